"""Backward warping by optical flow, and which pixels two frames both see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_grid(height: int, width: int, device: torch.device | None = None, dtype=torch.float32) -> Tensor:
    """Pixel coordinates ``[2, height, width]``: x, then y."""
    y = torch.arange(height, device=device, dtype=dtype)
    x = torch.arange(width, device=device, dtype=dtype)
    y, x = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([x, y])


def sample_at(image: Tensor, positions: Tensor, mode: str = "bilinear", padding: str = "border") -> Tensor:
    """Samples an image at pixel positions.

    Args:
        image: ``[b, C, H, W]``.
        positions: ``[b, 2, h, w]``, x and y in pixels of ``image``, pixel centres at integers.
        mode: ``bilinear`` or ``bicubic``.
        padding: ``border`` or ``zeros``.

    Returns:
        ``[b, C, h, w]`` in the dtype of ``image``; computed in float32, since 16 bits do not hold a position.
    """
    height, width = image.shape[-2:]
    grid = torch.stack([(2 * positions[:, 0] + 1) / width - 1, (2 * positions[:, 1] + 1) / height - 1], dim=-1).float()
    sampled = F.grid_sample(image.float(), grid, mode=mode, padding_mode=padding, align_corners=False)
    return sampled.to(image.dtype)


def warp(image: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
    """Brings ``image`` to the frame that ``flow`` belongs to: ``out(p) = image(p + flow(p))``.

    Args:
        image: ``[b, C, H, W]``.
        flow: ``[b, 2, H, W]`` in pixels.
    """
    return sample_at(image, pixel_grid(*flow.shape[-2:], flow.device, flow.dtype) + flow, mode)


def warped_neighbourhood(flow: Tensor, visible: Tensor) -> Tensor:
    """Of the frame before, the 3x3 tokens where each token was.

    Args:
        flow: ``[t, 2, h, w]``, from each frame to the one before, in tokens. visible: bool ``[t, h, w]``, whether it was seen.

    Returns:
        int64 ``[t, h w, 9]``, ``frame * h * w + token``; -1 for what lies outside the frame or was not seen, and throughout
        for the first frame.
    """
    t, _, h, w = flow.shape
    centre = (pixel_grid(h, w, flow.device) + flow).round().long()
    around = pixel_grid(3, 3, flow.device, torch.int64).flatten(1) - 1
    x, y = (centre.flatten(2)[..., None] + around[:, None]).unbind(1)
    inside = (x >= 0) & (x < w) & (y >= 0) & (y < h) & visible.flatten(1)[..., None]
    before = torch.arange(t, device=flow.device)[:, None, None] - 1
    return torch.where(inside & (before >= 0), before * h * w + y * w + x, -1)


def visible_mask(flow: Tensor, reverse: Tensor) -> Tensor:
    """Pixels whose match is seen in the other frame: the forward-backward test of Lai et al. 2018, eq. 3.

    Args:
        flow: ``[b, 2, H, W]``, from this frame to the other, in pixels.
        reverse: ``[b, 2, H, W]``, from the other frame to this one.

    Returns:
        float ``[b, 1, H, W]`` of 0 and 1; a match outside the other frame is not seen.
    """
    positions = pixel_grid(*flow.shape[-2:], flow.device, flow.dtype) + flow
    back = sample_at(reverse, positions)
    error = (flow + back).square().sum(1, keepdim=True)
    size = flow.square().sum(1, keepdim=True) + back.square().sum(1, keepdim=True)
    x, y = positions.split(1, dim=1)
    inside = (x >= -0.5) & (x <= flow.shape[-1] - 0.5) & (y >= -0.5) & (y <= flow.shape[-2] - 0.5)
    return ((error <= 0.01 * size + 0.5) & inside).to(flow.dtype)
