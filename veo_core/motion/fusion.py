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
# Weight of the frame before, where there is motion and where there is none.
MOVING, STILL = 0.6, 0.9


def estimate_motion(net: FlowNet, frames: Tensor) -> Tensor:
    """Flow of each frame but the first to the frame before, and how far it is to be trusted.

    A match is trusted where the forward-backward test passes and the two frames look alike there.

    Args:
        net: flow network on the frames' device.
        frames: ``[n + 1, 3, H, W]`` in 0..1, consecutive, H and W multiples of 4.

    Returns:
        float32 ``[n, 3, H / 4, W / 4]``: flow x and y in pixels of that quarter scale, trust in 0..1.
    """
    flow, back = flow_both_ways(net, frames)
    trust = visible_mask(flow, back)
    small = F.avg_pool2d(frames, STRIDE)
    difference = (small[1:] - warp(small[:-1], flow)).abs().mean(1, keepdim=True)
    difference = F.avg_pool2d(F.pad(difference, (1, 1, 1, 1), mode="replicate"), 3, 1)
    trust = trust * torch.exp(-((difference / 0.08) ** 2))
    return torch.cat([flow, trust], dim=1)


def latent_motion(motion: Tensor, size: tuple[int, int]) -> Tensor:
    """Motion ``[n, 3, H / 4, W / 4]`` at a latent's ``(h, w)``, its flow in latent pixels."""
    out = F.interpolate(motion, size, mode="area")
    x, y, trust = out.split(1, dim=1)
    return torch.cat([x * (size[1] / motion.shape[-1]), y * (size[0] / motion.shape[-2]), trust], dim=1)


class TemporalFusion:
    """:func:`fuse` over frames that come a few at a time.

    Args:
        amount: as of :func:`fuse`.
        last: the fused frame before the first, ``[1, 3, H, W]``, where fusion goes on; None where it begins.
    """

    def __init__(self, amount: float = 1.0, last: Tensor | None = None):
        self.amount, self.last = amount, last

    def __call__(self, frames: Tensor, motion: Tensor) -> Tensor:
        """The next frames ``[n, 3, H, W]``, motion ``[n, 3, H / 4, W / 4]`` -> what is shown, shape of ``frames``."""
        shown, fused = fuse(frames, *self.given(motion, frames.shape[-2:]), self.amount)
        self.last = fused[-1:].clone()
        return shown

    def given(self, motion: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The next frames' motion and the fused frame before them, of height and width ``size``, as :func:`fuse` takes them."""
        if self.last is not None:
            return motion, self.last
        return torch.cat([torch.zeros_like(motion[:1]), motion[1:]]), motion.new_zeros(1, 3, *size)


def fuse(frames: Tensor, motion: Tensor, last: Tensor, amount: float = 1.0) -> tuple[Tensor, Tensor]:
    """Recursive fusion of each decoded frame with the fused frame before, brought to it by the motion.

    ``y_t = a W y_{t-1} + (1 - a) f_t``. ``a`` is the trust in the motion times MOVING, rising to STILL where nothing moves.
    What is shown is ``d(y_t)``: ``d`` gives the fine detail of the mean the energy back that it has in ``f_t``, and a
    little more for what the decoder lost, so that the average does not blur. ``d`` stays outside the recursion, where it
    would grow dots along edges. Warping is bicubic.

    Args:
        frames: ``[n, 3, H, W]``, consecutive. motion: ``[n, 3, H / 4, W / 4]``; a frame whose trust is 0, such as a scene's
            first, stands alone.
        last: the fused frame before the first, ``[1, 3, H, W]``.
        amount: factor on all of that, 0..1; 0 leaves every frame as it is, bit for bit.

    Returns:
        What is shown, and the fused frames that the next ones lean on: shape of ``frames`` each.
    """
    if not amount:
        return frames, frames
    motion = F.interpolate(motion, frames.shape[-2:], mode="bilinear", align_corners=False)
    flow, trust = motion[:, :2] * STRIDE, motion[:, 2:]
    stillness = torch.exp(-((flow.norm(dim=1, keepdim=True) / 0.5) ** 2))
    weight = amount * trust * (MOVING + (STILL - MOVING) * stillness)
    fused = []
    for i in range(len(frames)):
        now = slice(i, i + 1)
        before = torch.lerp(warp(last, flow[now], "bicubic"), last, stillness[now])
        last = torch.lerp(frames[now], before, weight[now])
        fused.append(last)
    fused = torch.cat(fused)
    return _with_detail_of(frames, fused, amount), fused


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
