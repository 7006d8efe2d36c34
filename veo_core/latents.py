"""A clip's stylised latents on disk: what the denoiser leaves, and what decoding reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .memory.plan import MemoryPlan
from .sampling.timeline import Timeline
from .store import RunStore
from .video.reader import Clip
from .video.scenes import Survey

# Latent frames compared at a time.
CHECKED = 16


@dataclass
class StylizedLatents:
    """A clip's stylised latents on disk, with what decoding needs.

    Attributes:
        store: holds ``latents`` and ``motion``.
        clip: what was read. survey: its times and scenes.
        plan: chunk sizes.
        timeline: which latent frame stands for which frames.
        fusion: how much decoded frames are fused along the motion where nobody says otherwise, 0..1.
        notices: what a person should know of the run: what was wrong with the file, what of the style was not read.
    """

    store: RunStore
    clip: Clip
    survey: Survey
    plan: MemoryPlan
    timeline: Timeline
    fusion: float = 1.0
    notices: tuple[str, ...] = ()

    @cached_property
    def samples(self) -> Tensor:
        """All latents ``[n, C, h, w]`` as a tensor over the file."""
        return self.store.mapped("latents")

    def holds(self, samples: Tensor | None) -> bool:
        """Whether these are the run's own latents, or equal to them."""
        if samples is self.samples:
            return True
        if samples is None or samples.shape != self.samples.shape:
            return False
        parts = zip(samples.split(CHECKED), self.samples.split(CHECKED), strict=True)
        return all(torch.equal(a.to(b), b) for a, b in parts)


def latents_of(latent: dict[str, Any]) -> StylizedLatents:
    """What a ComfyUI LATENT of this pack carries.

    Raises InputError for a latent from elsewhere, one that was changed on its way, or one whose files are gone.
    """
    stylised = latent.get("veo")
    if not isinstance(stylised, StylizedLatents):
        raise InputError("latent was not made by the ST-Norm Denoiser (VeoStyle); connect that node's output")
    if not (stylised.store.folder / "manifest.json").is_file():
        raise InputError(
            f"latent: its files in {stylised.store.folder} are gone; "
            "change an input of the ST-Norm Denoiser, such as its seed, so that it runs again"
        )
    if not stylised.holds(latent.get("samples")):
        raise InputError(
            "latent was changed after the ST-Norm Denoiser (VeoStyle), and decoding reads what that node made; connect its "
            "output to the decoder without nodes between them"
        )
    return stylised
