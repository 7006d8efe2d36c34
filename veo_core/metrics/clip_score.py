"""How well frames match words, by CLIP; for people who have its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import ModelError
from ..style.clip import load_image_tower, load_text_tower
from ..video.reader import Clip

EVERY = 8


@torch.no_grad()
def clip_score(
    result: Clip, text: str, image_tower: str | Path, text_tower: str | Path, download: bool = False
) -> float:
    """Mean cosine of frames and a text, times 100 (Hessel et al. 2021, without their factor), of one frame in eight.

    Args:
        image_tower, text_tower: of the same CLIP; see :mod:`..style.clip`.

    Raises:
        ModelError: the towers do not belong together, or cannot be read.
    """
    image, words = load_image_tower(image_tower, download), load_text_tower(text_tower, download)
    wanted = words([text])
    total = count = 0
    for index, frame in enumerate(result.frames()):
        if index % EVERY:
            continue
        seen = image([frame.image]).pooled
        if seen.shape != wanted.shape:
            raise ModelError(
                f"{image_tower} gives vectors of {seen.shape[1]} and {text_tower} of {wanted.shape[1]}; give towers of one CLIP"
            )
        total += float(torch.cosine_similarity(seen, wanted)) * 100
        count += 1
    return total / count
