"""A contact sheet: the scenes of a clip on one picture."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..progress import Monitor, Progress, ignore
from .reader import Clip
from .scenes import Scene, Survey

TILE, LABEL, GAP = 240, 44, 8
MOST = 100


def contact_sheet(clip: Clip, survey: Survey, monitor: Monitor = ignore) -> Tensor:
    """The middle frame of each scene with its number and place, the first 100 scenes.

    ``monitor`` is told before each frame; it may raise to interrupt.

    Returns:
        float32 ``[H, W, 3]`` in 0..1.
    """
    scenes = survey.scenes[:MOST]
    columns = min(len(scenes), max(2, math.ceil(math.sqrt(len(scenes)))))
    width, height = clip.size
    tile = (TILE, max(1, round(TILE * height / width)))
    middles = {(s.start + s.end) // 2: i for i, s in enumerate(scenes)}
    rows = -(-len(scenes) // columns)
    step = (tile[0] + GAP, tile[1] + LABEL + GAP)
    sheet = Image.new("RGB", (GAP + columns * step[0], GAP + rows * step[1]), "#16181d")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for frame in clip.scaled(*tile).picked(middles, lambda index: monitor(Progress("sheet", index, survey.frames))):
        index = middles[frame.index]
        x, y = GAP + index % columns * step[0], GAP + index // columns * step[1]
        pixels = frame.image.mul(255).round().byte().movedim(0, -1).numpy()
        sheet.paste(Image.fromarray(pixels), (x, y))
        for line, text in enumerate(_label(survey, index)):
            draw.text((x, y + tile[1] + 3 + 18 * line), text, "#e8e6e1", font)
    return torch.from_numpy(np.array(sheet)).float() / 255


def describe_scenes(survey: Survey) -> str:
    """One line a scene: its span, and which earlier scene it returns to."""
    count = len(survey.scenes)
    head = f"{survey.frames} frames, {float(survey.duration):.2f} s, {count} scene{'s' * (count != 1)}"
    return "\n".join([head, *(", ".join(_label(survey, i)) for i in range(count)), *survey.notices])


def _label(survey: Survey, index: int) -> tuple[str, str]:
    scene: Scene = survey.scenes[index]
    begin = float(survey.times[scene.start])
    end = float(survey.times[scene.end] if scene.end < survey.frames else survey.duration)
    home = next(i for i, s in enumerate(survey.scenes) if s.start <= scene.anchor < s.end)
    returns = f", returns to {home + 1}" if home != index else ""
    return f"scene {index + 1}: {begin:.2f} to {end:.2f} s", f"frames {scene.start} to {scene.end - 1}{returns}"
