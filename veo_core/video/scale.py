"""Pictures at another size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def scale(image: Tensor, width: int, height: int) -> Tensor:
    """``[C, H, W]`` at another size by antialiased bicubic: an area-like filter where it shrinks, Lanczos-like where it grows."""
    if image.shape[-2:] == (height, width):
        return image
    out = F.interpolate(image[None], (height, width), mode="bicubic", align_corners=False, antialias=True)
    return out[0].clamp(0, 1)
