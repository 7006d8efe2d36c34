"""Noise as a function of seed and absolute frame."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def frame_noise(seed: int, frames: range, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise, drawn on the CPU: the same for any window, chunk, device or resume.

    Args:
        seed: any integer.
        frames: absolute frame indices.
        shape: of one frame's latent ``(C, h, w)``.

    Returns:
        float32 ``[len(frames), *shape]`` on the CPU.
    """
    return torch.stack([torch.randn(shape, generator=frame_generator(seed, frame)) for frame in frames])


def frame_generator(seed: int, frame: int, use: str = "") -> torch.Generator:
    """A CPU generator whose draws depend on the seed, the absolute frame and what they are used for."""
    key = hashlib.blake2b(f"{seed}:{frame}{use and ':' + use}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
