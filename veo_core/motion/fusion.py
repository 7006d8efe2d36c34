"""Motion between frames as the engine carries it, and fusion of decoded frames along it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .flow import STRIDE, FlowNet, flow_both_ways
from .warp import visible_mask, warp

MOTION_CHANNELS = 3
# Makes up for the detail that decoders lose; measured in benchmarks/coherence.py.
DETAIL = 1.2


def estimate_motion(net: FlowNet, frames: Tensor, previous: Tensor) -> Tensor:
    """Flow to the frame before, and how far it is to be trusted.

    A match is trusted where the forward-backward test passes and the two frames look alike there.

    Args:
        net: flow network on the frames' device.
        frames, previous: ``[n, 3, H, W]`` in 0..1, H and W multiples of 4.

    Returns:
        float32 ``[n, 3, H / 4, W / 4]``: flow x and y in pixels of that quarter scale, trust in 0..1.
    """
    flow, back = flow_both_ways(net, frames, previous)
    trust = visible_mask(flow, back)
    now, before = (F.avg_pool2d(x, STRIDE) for x in (frames, previous))
    difference = (now - warp(before, flow)).abs().mean(1, keepdim=True)
    difference = F.avg_pool2d(F.pad(difference, (1, 1, 1, 1), mode="replicate"), 3, 1)
    trust = trust * torch.exp(-((difference / 0.08) ** 2))
    return torch.cat([flow, trust], dim=1)


def latent_motion(motion: Tensor, size: tuple[int, int]) -> Tensor:
    """Motion ``[n, 3, H / 4, W / 4]`` at a latent's ``(h, w)``, its flow in latent pixels."""
    out = F.interpolate(motion, size, mode="area")
    x, y, trust = out.split(1, dim=1)
    return torch.cat([x * (size[1] / motion.shape[-1]), y * (size[0] / motion.shape[-2]), trust], dim=1)


class TemporalFusion:
    """Recursive fusion of each decoded frame with the fused frame before, brought to it by the motion.

    ``y_t = a W y_{t-1} + (1 - a) f_t``. ``a`` is the trust in the motion times ``moving``, rising to ``still`` where
    nothing moves. What is shown is ``d(y_t)``: ``d`` gives the fine detail of the mean the energy back that it has in
    ``f_t``, and a little more for what the decoder lost, so that the average does not blur. ``d`` stays outside the
    recursion, where it would grow dots along edges. Warping is bicubic; the state is one frame.

    Args:
        amount: factor on all of that, 0..1; 0 leaves every frame as it is, bit for bit.
        last: the fused frame before the first, ``[1, 3, H, W]``, where fusion goes on.
        moving, still: weight of the frame before, where there is motion and where there is none.
    """

    def __init__(self, amount: float = 1.0, last: Tensor | None = None, moving: float = 0.6, still: float = 0.9):
        self.amount, self.moving, self.still = amount, moving, still
        self.last = last

    def reset(self) -> None:
        """Forgets the frame before; the next frame stands alone."""
        self.last = None

    def __call__(self, frame: Tensor, motion: Tensor) -> Tensor:
        """``frame [1, 3, H, W]``, ``motion [1, 3, H / 4, W / 4]`` -> the fused frame, same shape."""
        alone = self.last is None or not self.amount
        self.last = frame.clone() if alone else self._fuse(frame, self.last, motion)
        return _with_detail_of(frame, self.last, self.amount) if self.amount else frame

    def _fuse(self, frame: Tensor, last: Tensor, motion: Tensor) -> Tensor:
        motion = F.interpolate(motion, frame.shape[-2:], mode="bilinear", align_corners=False)
        flow, trust = motion[:, :2] * STRIDE, motion[:, 2:]
        speed = flow.norm(dim=1, keepdim=True)
        stillness = torch.exp(-((speed / 0.5) ** 2))
        before = torch.lerp(warp(last, flow, "bicubic"), last, stillness)
        weight = (
            self.amount
            * trust
            * torch.lerp(torch.full_like(stillness, self.moving), torch.full_like(stillness, self.still), stillness)
        )
        return torch.lerp(frame, before, weight)


def _blur(x: Tensor, radius: int) -> Tensor:
    size = 2 * radius + 1
    return F.avg_pool2d(F.pad(x, [radius] * 4, mode="replicate"), size, 1)


def _with_detail_of(frame: Tensor, fused: Tensor, amount: float) -> Tensor:
    """``fused`` with its detail scaled to DETAIL times the local strength of ``frame``'s; at most 1.5 times, never down.

    ``amount`` is the share of that gain.
    """
    base = _blur(_blur(fused, 1), 1)
    detail, wanted = fused - base, frame - _blur(_blur(frame, 1), 1)
    wanted_energy, own_energy = (_blur(x.square().mean(1, keepdim=True), 4) for x in (wanted, detail))
    gain = (DETAIL * ((wanted_energy + 1e-6) / (own_energy + 1e-6)).sqrt()).clamp(1.0, 1.5)
    return base + torch.lerp(torch.ones_like(gain), gain, amount) * detail
