"""What the engine asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..options import Defaults, StylizeOptions
from ..sampling.sampler import WindowJob
from ..style.encoder import Style
from ..video.scenes import Survey

# What every model's result depends on, and what noise and prompts add to it.
COMMON = frozenset({"steps", "guidance", "strength", "window", "overlap", "min_scene", "detector"})
DIFFUSION = COMMON | {"seed", "injection", "denoise", "words"}


class Backbone(Protocol):
    """A model that stylises latents of frames. Each architecture is one implementation; the engine knows only this.

    Frames are float ``[n, 3, H, W]`` in 0..1 with sides that are multiples of ``multiple``; latents are
    ``[n, channels, H / factor, W / factor]``. All tensors are on ``device``.

    Attributes:
        name: for people and manifests. digest: hash of the weights.
        channels, factor, multiple: geometry of the latents.
        time_factor: frames that share a latent frame, see :class:`~..sampling.timeline.Timeline`.
        defaults: settings that suit it.
        module: all networks, for whoever moves them between devices.
        device: where the networks are now.
        weight_bytes: of all its networks.
        managed: whether its networks are moved between devices by someone else already.
        reads: of the options, and of a style's ``words``, what changes its result.
        temporal: whether it attends over time by itself.
        captured: whether its calls on a GPU wait for launches and can be captured as CUDA graphs: nothing in them
            synchronises, and its weights stay where they are during a run.
    """

    name: str
    digest: str
    channels: int
    factor: int
    time_factor: int
    multiple: int
    defaults: Defaults
    module: torch.nn.Module
    weight_bytes: int
    managed: bool
    reads: frozenset[str]
    temporal: bool
    captured: bool

    @property
    def device(self) -> torch.device: ...

    def encode(self, frames: Tensor) -> Tensor:
        """Frames to latents: each frame on its own, or with a time factor r, the first alone and then each r together."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to frames, ``1 + r (n - 1)`` of them; not clamped. With r = 1 each frame is on its own."""
        ...

    def condition(self, style: Style, options: StylizeOptions, survey: Survey) -> Any:
        """Reads a style once for a whole run. What comes back is passed to ``sample`` as it is.

        Raises InputError for a style that this model cannot read.
        """
        ...

    def sample(self, condition: Any, job: WindowJob) -> Tensor:
        """All steps of a window: clean latents ``[t, C, h, w]``, the anchor's first.

        It calls ``job.before_step`` before each step and ``job.fuse`` once a prediction, and leaves no state behind.
        """
        ...

    def rehearse(self, x: Tensor, options: StylizeOptions) -> Tensor:
        """One evaluation of the model on latents ``[t, C, h, w]`` as ``sample`` does it, to measure its memory."""
        ...

    def guides(self, style: Style) -> bool:
        """Whether guidance has something of a style to set against nothing."""
        ...

    def evaluations(self, options: StylizeOptions) -> int:
        """How often ``sample`` evaluates the model in a window, each time with something for the next window."""
        ...
