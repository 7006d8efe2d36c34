"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layers.st_norm import TemporalContext
from ..style.encoder import Style


@dataclass(frozen=True)
class Defaults:
    """Settings that suit a model: denoising steps, guidance scale, frames in a window and shared by two windows."""

    steps: int
    guidance: float
    window: int
    overlap: int


@dataclass
class Sites:
    """What the sites of a model (attention, normalisation, motion) see beside the latents of one window.

    The first entry of every tensor is the scene's anchor frame.

    Attributes:
        content: latents of the source frames ``[t, C, h, w]``.
        motion: ``[t, 3, h, w]``, flow to the frame before in latent pixels, and trust in 0..1.
        temporal: layout of the frames and the moments carried from the window before.
    """

    content: Tensor
    motion: Tensor
    temporal: TemporalContext


class Schedule(Protocol):
    """Steps of a sampler: ``sigmas`` before each step, and ``step(index, x, clean) -> x`` after it."""

    @property
    def sigmas(self) -> list[float]: ...

    def step(self, index: int, x: Tensor, clean: Tensor) -> Tensor: ...


class Backbone(Protocol):
    """A model that stylises latents of frames. Each architecture is one implementation; the engine knows only this.

    Frames are float ``[n, 3, H, W]`` in 0..1 with sides that are multiples of ``multiple``; latents are
    ``[n, channels, H / factor, W / factor]``. All tensors are on ``device``.

    Attributes:
        name: for people and manifests. digest: hash of the weights.
        channels, factor, multiple: geometry of the latents.
        defaults: settings that suit it.
        module: all networks, for whoever moves them between devices.
        device: where the networks are now.
        weight_bytes: of all its networks.
    """

    name: str
    digest: str
    channels: int
    factor: int
    multiple: int
    defaults: Defaults
    module: torch.nn.Module
    weight_bytes: int

    @property
    def device(self) -> torch.device: ...

    def encode(self, frames: Tensor) -> Tensor:
        """Frames to latents, each frame on its own."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to frames, each frame on its own; not clamped."""
        ...

    def condition(self, style: Style, guidance: float, strength: float) -> Any:
        """Reads a style once for a whole run. What comes back is passed to ``predict`` as it is."""
        ...

    def schedule(self, steps: int, strength: float) -> Schedule:
        """A fresh schedule for one window."""
        ...

    def start(self, content: Tensor, noise: Callable[[], Tensor], strength: float) -> Tensor:
        """Latents before the first step; ``noise()`` draws the noise of these frames where the model wants any."""
        ...

    def predict(self, x: Tensor, sigma: float, condition: Any, sites: Sites) -> Tensor:
        """The clean latents ``[t, C, h, w]`` predicted from ``x`` at ``sigma``."""
        ...
