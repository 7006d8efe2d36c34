"""Structure metrics: how much of the source's drawing the result keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def luma(image: Tensor) -> Tensor:
    """``[n, 3, H, W]`` -> ``[n, 1, H, W]``, Rec. 601 weights."""
    weights = image.new_tensor([0.299, 0.587, 0.114])[:, None, None]
    return (image * weights).sum(1, keepdim=True)


def ssim(a: Tensor, b: Tensor, window: int = 11) -> float:
    """Structural similarity (Wang et al. 2004, eq. 13) of luma with a box window; 1 for equal pictures ``[n, 3, H, W]``."""
    x, y = luma(a), luma(b)

    def mean(v: Tensor) -> Tensor:
        return F.avg_pool2d(v, window, 1)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    return float((((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean())


def gradient_correlation(a: Tensor, b: Tensor) -> float:
    """Pearson correlation of the gradient magnitudes of luma; 1 when all edges agree, 0 when unrelated."""

    def edges(image: Tensor) -> Tensor:
        y = luma(image)
        dx, dy = y[..., :-1, 1:] - y[..., :-1, :-1], y[..., 1:, :-1] - y[..., :-1, :-1]
        return (dx.square() + dy.square()).sqrt().flatten()

    x, y = edges(a), edges(b)
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])
