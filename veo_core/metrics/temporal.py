"""Temporal metrics: warping error beside what a blur would do to it, flicker, change where nothing moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..motion.warp import visible_mask, warp


def high_frequencies(x: Tensor) -> Tensor:
    """What a Gaussian of sigma 1 takes away from ``[n, C, H, W]``."""
    k = torch.exp(-0.5 * torch.arange(-3, 4, device=x.device, dtype=x.dtype) ** 2)
    k = (k / k.sum()).repeat(x.shape[1], 1)
    padded = F.pad(x, (3, 3, 3, 3), mode="replicate")
    low = F.conv2d(padded, k[:, None, None, :], groups=x.shape[1])
    return x - F.conv2d(low, k[:, None, :, None], groups=x.shape[1])


def occlusion_mask(flow: Tensor, reverse: Tensor) -> Tensor:
    """Pixels to measure: seen in both frames and not at a motion boundary (Lai et al. 2018, eqs. 3 and 4).

    Args:
        flow, reverse: ``[n, 2, H, W]`` in pixels, to the other frame and back.
    """
    dx, dy = F.pad(flow.diff(dim=-1), (0, 1)), F.pad(flow.diff(dim=-2), (0, 0, 0, 1))
    gradient = (dx.square() + dy.square()).sum(1, keepdim=True)
    smooth = gradient <= 0.01 * flow.square().sum(1, keepdim=True) + 0.002
    return visible_mask(flow, reverse) * smooth


@dataclass
class TemporalMetrics:
    """Accumulates over consecutive pairs of frames; feed them in order with :meth:`add`.

    Every figure that a blur improves has one beside it that a blur spoils.
    """

    sums: dict[str, float] = field(default_factory=dict)

    def _add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def add(
        self, now: Tensor, before: Tensor, source: Tensor, source_before: Tensor, flow: Tensor, visible: Tensor
    ) -> None:
        """Takes one pair.

        Args:
            now, before: result frames ``[1, 3, H, W]`` in 0..1. source, source_before: the frames they were made from.
            flow: ``[1, 2, H, W]``, from ``now`` to ``before``, pixels. visible: ``[1, 1, H, W]`` of 0 and 1.
        """
        error = (warp(before, flow, "bicubic") - now).square()
        still = (flow.norm(dim=1, keepdim=True) < 0.25) & ((source - source_before).abs().mean(1, keepdim=True) < 0.02)
        self._add(
            error=(error * visible).sum(),
            seen=visible.sum() * 3,
            variance=now.var((-2, -1)).mean(),
            detail=high_frequencies(now).square().mean(),
            still_change=((now - before).abs() * still).sum(),
            still=still.sum() * 3,
            difference=((now - before) - (source - source_before)).abs().mean(),
            pairs=1,
        )

    def add_triple(self, frames: Tensor, source: Tensor) -> None:
        """Takes three consecutive frames of result and source, ``[3, 3, H, W]``, for the flicker index."""
        own, given = ((f[1] - (f[0] + f[2]) / 2).abs().mean() for f in (frames, source))
        self._add(flicker=own - given, triples=1)

    def values(self) -> dict[str, float]:
        """The figures by name: e_warp, e_over_variance, e_over_detail, detail_share, still_change, difference, flicker."""
        s = self.sums
        pairs = s.get("pairs", 0.0) or float("nan")
        e_warp = s["error"] / max(s["seen"], 1.0)
        variance, detail = s["variance"] / pairs, s["detail"] / pairs
        return {
            "e_warp": e_warp,
            "e_over_variance": e_warp / variance,
            "e_over_detail": e_warp / detail,
            "detail_share": detail / variance,
            "still_change": s["still_change"] / s["still"] if s["still"] else float("nan"),
            "still_share": s["still"] / (s["pairs"] * max(s["seen"], 1.0) / pairs) if s["seen"] else float("nan"),
            "difference": s["difference"] / pairs,
            "flicker": s["flicker"] / s["triples"] if s.get("triples") else float("nan"),
        }
