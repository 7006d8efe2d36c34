"""Denoising of one window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..backbones.base import Backbone, Sites
from ..layers.st_norm import TemporalContext
from .noise import frame_noise
from .windows import Window, blend_shared


@dataclass
class WindowState:
    """What one window leaves to the next of its scene.

    Attributes:
        shared: result for the frames that both hold ``[n, C, h, w]``; empty at a scene's first window.
        moments: ST-Norm's reference moments by layer.
    """

    shared: Tensor | None = None
    moments: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def denoise_window(
    backbone: Backbone,
    condition: object,
    window: Window,
    stride: int,
    content: Tensor,
    motion: Tensor,
    anchor: Tensor,
    state: WindowState,
    *,
    steps: int,
    strength: float,
    seed: int,
    before_step: Callable[[int], None],
) -> tuple[Tensor, WindowState]:
    """All steps of a window, its scene's anchor frame beside it in every batch.

    Frames shared with the window before are cross-faded in the predicted clean latents at every step, never in noisy
    ones and never through pixels.

    Args:
        stride: frames from this window's start to the next one's.
        content: source latents ``[n, C, h, w]``. motion: ``[n, 3, h, w]`` in latent pixels.
        anchor: source latent of the scene's anchor frame ``[1, C, h, w]``.
        state: left by the window before.
        before_step: called with the number of each step; may raise to interrupt.

    Returns:
        Clean latents ``[n, C, h, w]``, and what the next window needs.
    """
    n, shape = len(content), tuple(content.shape[1:])
    content = torch.cat([anchor, content])
    # In the batch the anchor stands before the window's first frame; no motion leads from one to the other.
    motion = torch.cat([torch.zeros_like(motion[:1]).expand(2, -1, -1, -1), motion[1:]])
    handed: dict[str, Tensor] = {}
    frames = [window.scene.anchor, *range(window.start, window.end)]

    def noise() -> Tensor:
        return torch.cat([frame_noise(seed, range(f, f + 1), shape) for f in frames]).to(content)

    schedule = backbone.schedule(steps, strength)
    x = clean = backbone.start(content, noise, strength)
    for index, sigma in enumerate(schedule.sigmas):
        before_step(index)
        temporal = TemporalContext(n + 1, state.moments, None if window.last else stride - 1, f"{index}.", handed)
        clean = backbone.predict(x, sigma, condition, Sites(content, motion, temporal))
        if state.shared is not None:
            shared = slice(1, 1 + len(state.shared))
            clean[shared] = blend_shared(state.shared, clean[shared])
        x = schedule.step(index, x, clean)
    return clean[1:], WindowState(None if window.last else clean[1 + stride :].clone(), handed)
