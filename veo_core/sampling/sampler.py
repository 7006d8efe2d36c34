"""Denoising of one window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cuda_graphs import CudaGraphs
from ..layers.st_norm import TemporalContext
from ..options import StylizeOptions
from .noise import frame_generator, frame_noise
from .windows import Window, blend_shared


@dataclass
class WindowState:
    """What one window leaves to the next of its scene.

    Attributes:
        shared: the clean latents that were predicted at each step for the frames that both hold ``[s, n, C, h, w]``;
            None at a scene's first window.
        moments: ST-Norm's reference moments by layer.
    """

    shared: Tensor | None = None
    moments: dict[str, Tensor] = field(default_factory=dict)

    @property
    def overlap(self) -> int:
        """How many frames both windows hold."""
        return 0 if self.shared is None else self.shared.shape[1]


@dataclass
class WindowJob:
    """One window to denoise, its scene's anchor frame first in every tensor and list.

    Attributes:
        window: which latent frames. scene: index of its scene.
        frames: the absolute frame that each latent frame stands for, the anchor's first.
        content: source latents ``[t, C, h, w]``.
        motion: ``[t, 3, h, w]``, flow to the frame before in latent pixels, and trust in 0..1; None where latent frames
            stand for several frames each.
        stride: latent frames from this window's start to the next one's.
        options: of the run, every choice made.
        state: left by the window before.
        before_step: called with the number of each step; may raise to interrupt.
        graphs: of the run, for models that are captured.
    """

    window: Window
    scene: int
    frames: list[int]
    content: Tensor
    motion: Tensor | None
    stride: int
    options: StylizeOptions
    state: WindowState
    before_step: Callable[[int], None]
    graphs: CudaGraphs = field(default_factory=lambda: CudaGraphs(False))

    def __post_init__(self) -> None:
        self._handed: dict[str, Tensor] = {}
        self._predicted: list[Tensor] = []
        self._noise: Tensor | None = None

    def noise(self) -> Tensor:
        """The frames' own noise ``[t, C, h, w]``."""
        if self._noise is None:
            shape, seed = tuple(self.content.shape[1:]), self.options.seed
            self._noise = torch.cat([frame_noise(seed, range(f, f + 1), shape) for f in self.frames]).to(self.content)
        return self._noise

    def generators(self) -> list[torch.Generator]:
        """A fresh generator for each frame, for steps that add noise: what it draws depends on seed, frame and step."""
        return [frame_generator(self.options.seed, f, "steps") for f in self.frames]

    def temporal(self, index: int) -> TemporalContext:
        """Layout of the frames at a step, their motion, and the moments carried from the window before."""
        hand_over = None if self.window.last else self.stride - 1
        return TemporalContext(
            len(self.content), carry=self.state.moments, hand_over=hand_over, scope=f"{index}.", handed=self._handed,
            motion=self.motion,
        )  # fmt: skip

    def fuse(self, index: int, clean: Tensor) -> Tensor:
        """Cross-fades the clean latents predicted at a step with those that the window before predicted at that step.

        Call it once a model evaluation, in order. Never for noisy latents, and never through pixels.
        """
        if self.state.shared is not None:
            shared = slice(1, 1 + self.state.overlap)
            clean = torch.cat([clean[:1], blend_shared(self.state.shared[index], clean[shared]), clean[shared.stop :]])
        if not self.window.last:
            self._predicted.append(clean[1 + self.stride :].clone())
        return clean

    def left(self) -> WindowState:
        """What the next window takes over."""
        return WindowState(None if self.window.last else torch.stack(self._predicted), self._handed)
