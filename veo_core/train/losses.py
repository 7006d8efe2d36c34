"""Perceptual, style and temporal losses on VGG19 features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

STYLE_LAYERS = ("relu1_1", "relu2_1", "relu3_1", "relu4_1")
CONTENT_LAYERS = ("relu3_1", "relu4_1")


def gram(features: Tensor) -> Tensor:
    """Gram matrices ``[n, C, C]`` of ``[n, C, H, W]``, means over positions, float32 (Gatys et al. 2016, eq. 3)."""
    f = rearrange(features.float(), "n c h w -> n c (h w)")
    return f @ f.mT / f.shape[-1]


def style_loss(features: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Relative distance of Gram matrices, means and standard deviations over the style layers."""
    total = torch.zeros((), device=next(iter(features.values())).device)
    for name in STYLE_LAYERS:
        a, b = features[name].float(), target[name].float()
        ga, gb = gram(a), gram(b)
        total = total + ((ga - gb).square().sum((-2, -1)) / (gb.square().sum((-2, -1)) + 1e-6)).mean()
        for f in (lambda x: x.mean((-2, -1)), lambda x: x.std((-2, -1))):
            ma, mb = f(a), f(b)
            total = total + ((ma - mb).square().sum(1) / (mb.square().sum(1) + 1e-6)).mean()
    return total / (3 * len(STYLE_LAYERS))


def _instance_normalised(x: Tensor) -> Tensor:
    x = x.float()
    return (x - x.mean((-2, -1), keepdim=True)) / (
        x.std((-2, -1), keepdim=True) + 0.05 * x.std((1, 2, 3), keepdim=True) + 1e-5
    )


def content_loss(features: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Mean squared distance of instance-normalised features: structure, whatever the colours."""
    pairs = ((features[n], target[n]) for n in CONTENT_LAYERS)
    losses = [(_instance_normalised(a) - _instance_normalised(b)).square().mean() for a, b in pairs]
    return torch.stack(losses).mean()


def feature_l1(
    features: dict[str, Tensor], target: dict[str, Tensor], layers=("relu1_1", "relu2_1", "relu3_1")
) -> Tensor:
    """Mean absolute feature distance, each layer relative to the target's mean magnitude."""
    losses = []
    for name in layers:
        a, b = features[name].float(), target[name].float()
        losses.append((a - b).abs().mean() / (b.abs().mean() + 1e-4))
    return torch.stack(losses).mean()


def gradient_l1(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of horizontal and vertical differences of two pictures ``[n, C, H, W]``."""
    d = a.float() - b.float()
    return d.diff(dim=-1).abs().mean() + d.diff(dim=-2).abs().mean()


def high_frequencies(x: Tensor) -> Tensor:
    """What a 5x5 binomial blur takes away, of ``[n, C, H, W]``."""
    low = F.pad(x, (2, 2, 2, 2), mode="replicate")
    for _ in range(2):
        low = F.avg_pool2d(F.avg_pool2d(low, 2, 1), (2, 2), 1)
    return x - low


def colour_loss(picture: Tensor, target: Tensor) -> Tensor:
    """Distance of RGB means and covariances of ``[n, 3, H, W]`` pictures, each relative to the target's spread."""
    (ma, ca), (mb, cb) = (_rgb_moments(v) for v in (picture, target))
    spread = cb.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-2
    mean = (ma - mb).square().sum(-1) / spread
    covariance = (ca - cb).square().sum((-2, -1)) / spread.square()
    return (mean + covariance).mean()


def _rgb_moments(picture: Tensor) -> tuple[Tensor, Tensor]:
    x = picture.float().flatten(2)
    mean = x.mean(-1)
    centred = x - mean[..., None]
    return mean, centred @ centred.mT / x.shape[-1]


def luma(picture: Tensor) -> Tensor:
    """Grey of a picture as three equal channels: what content losses see, so that the source's colours need not stay."""
    weights = (0.299, 0.587, 0.114)
    grey = sum(w * picture[:, i : i + 1] for i, w in enumerate(weights))
    return grey.expand(-1, 3, -1, -1)


def flat_texture(picture: Tensor, source: Tensor, limit: Tensor) -> Tensor:
    """Fine texture of ``picture`` beyond half of ``limit``'s where ``source`` is flat; all ``[n, 3, H, W]``."""
    grey = luma(source)[:, :1].float()
    flat = torch.exp(-_local((grey - _local(grey)).square()) / 0.03**2)
    own, allowed = (_local(high_frequencies(v.float()).abs().mean(1, keepdim=True)) for v in (picture, limit))
    return (flat * (own - 0.5 * allowed).clamp(min=0)).mean()


def _local(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (4, 4, 4, 4), mode="replicate"), 9, 1)


def temporal_l1(current: Tensor, warped: Tensor, visible: Tensor) -> Tensor:
    """Mean absolute difference over the visible pixels of ``[n, 3, H, W]`` pictures."""
    difference = (current.float() - warped.float()).abs() * visible
    return difference.sum() / (3 * visible.sum() + 1)
