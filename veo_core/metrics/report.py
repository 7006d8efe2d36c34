"""All metrics of a result against its source, in one pass over both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..motion.flow import STRIDE, FlowNet, flow_both_ways
from ..video.reader import Clip
from .structure import gradient_correlation, ssim
from .temporal import TemporalMetrics, occlusion_mask

MEANINGS = {
    "e_warp": "squared change along the motion; low is steady, but a blur lowers it too",
    "e_over_variance": "the same against the picture's contrast",
    "e_over_detail": "the same against its fine detail, which a blur lowers as well",
    "detail_share": "fine detail against contrast; higher is crisper",
    "still_change": "change from frame to frame where the source stands still",
    "still_share": "share of pixels where the source stands still",
    "difference": "frame differences against the source's",
    "flicker": "excess of frame-to-frame flicker over the source's",
    "ssim": "structure kept of the source, luma, 0..1",
    "gradient_correlation": "agreement of edges with the source's, -1..1",
}


@dataclass(frozen=True)
class Metric:
    """One figure with its name and what it says."""

    name: str
    value: float
    meaning: str


def full_flow(net: FlowNet, now: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Flow ``[1, 2, H, W]`` in pixels from ``now`` to ``before`` and back, by the network, at full size."""

    def grow(flow: Tensor) -> Tensor:
        big = F.interpolate(flow, scale_factor=STRIDE, mode="bilinear", align_corners=False) * STRIDE
        return big[..., : now.shape[-2], : now.shape[-1]]

    there, back = flow_both_ways(net, torch.cat([before, now]))
    return grow(there), grow(back)


@torch.no_grad()
def measure(result: Clip, source: Clip, flow: FlowNet) -> list[Metric]:
    """Reads both clips once, side by side; memory is three frames.

    Raises InputError when they differ in size or number of frames, or have fewer than two.
    """
    if result.size != source.size:
        raise InputError(
            f"{result.path} is {result.size} and {source.path} is {source.size} pixels; give videos of one size"
        )
    device = next(flow.parameters()).device
    temporal, structure = TemporalMetrics(), []
    kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)
    pairs = zip(result.frames(), source.frames(), strict=True)
    try:
        for frame, given in pairs:
            kept.append((frame.image[None].to(device), given.image[None].to(device)))
            now, now_source = kept[-1]
            structure.append((ssim(now, now_source), gradient_correlation(now, now_source)))
            if len(kept) > 1:
                before, before_source = kept[-2]
                there, back = full_flow(flow, now_source, before_source)
                temporal.add(now, before, now_source, before_source, there, occlusion_mask(there, back))
            if len(kept) == 3:
                temporal.add_triple(torch.cat([k[0] for k in kept]), torch.cat([k[1] for k in kept]))
    except ValueError as e:
        raise InputError(f"{result.path} and {source.path} differ in their number of frames") from e
    if len(structure) < 2:
        raise InputError(f"{source.path} has one frame; give videos of two or more")
    values = temporal.values()
    values["ssim"], values["gradient_correlation"] = (sum(v) / len(structure) for v in zip(*structure, strict=True))
    return [Metric(name, value, MEANINGS[name]) for name, value in values.items()]
