"""Windows: which frames are denoised together, on a grid that belongs to the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..video.scenes import Scene


@dataclass(frozen=True)
class Window:
    """Frames denoised together.

    Attributes:
        start, end: absolute frame indices, end excluded.
        shared: how many of its first frames the window before has already predicted.
        scene: the scene it lies in.
        last: whether it is its scene's last.
    """

    start: int
    end: int
    shared: int
    scene: Scene
    last: bool


def windows_of(scenes: tuple[Scene, ...], size: int, overlap: int) -> list[Window]:
    """Windows of ``size`` frames every ``size - overlap``, counted from each scene's start; none crosses a cut.

    A scene's last window ends with the scene and may be shorter.
    """
    out: list[Window] = []
    for scene in scenes:
        start = scene.start
        while True:
            end = min(start + size, scene.end)
            shared = overlap if start > scene.start else 0
            out.append(Window(start, end, shared, scene, end == scene.end))
            if end == scene.end:
                break
            start += size - overlap
    return out


def blend_shared(before: Tensor, now: Tensor) -> Tensor:
    """Linear cross-fade over the frames that two windows share.

    Args:
        before: the earlier window's result ``[n, C, h, w]`` for the shared frames.
        now: the later window's prediction of the clean latents for the same frames.
    """
    n = len(before)
    weight = torch.arange(1, n + 1, device=now.device, dtype=now.dtype)[:, None, None, None] / (n + 1)
    return torch.lerp(before.to(now), now, weight)
