"""Optical flow between neighbouring frames: a small coarse-to-fine network, bundled with veo-mini."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...kernels.local_correlation import local_correlation
from ..errors import ModelError
from .warp import warp

STRIDE = 4
BUNDLED = Path(__file__).parents[1] / "weights" / "veo-mini.safetensors"


def _conv(cin: int, cout: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1), nn.LeakyReLU(0.1))


class _Level(nn.Module):
    """Refines the flow at one scale."""

    def __init__(self, features: int, radius: int, hidden: int):
        super().__init__()
        self.radius = radius
        width = (2 * radius + 1) ** 2 + features + 2 + 16
        self.body = nn.Sequential(_conv(width, hidden), _conv(hidden, hidden), _conv(hidden, hidden))
        self.state = _conv(hidden, 16)
        self.head = nn.Conv2d(16, 2, 3, 1, 1)

    def forward(self, a: Tensor, b: Tensor, flow: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        match = local_correlation(a, warp(b, flow), self.radius)
        state = self.state(self.body(torch.cat([match, a, flow.to(a.dtype), state], dim=1)))
        return flow + self.head(state).float(), state


class FlowNet(nn.Module):
    """Coarse-to-fine optical flow after PWC-Net (Sun et al. 2018): features at 1/4 to 1/32, warping, local correlation.

    The flow points from the first frame to the second, in pixels of the frames, so that ``warp(second, flow)`` lines
    up with the first.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 48, 64, 96), radii: tuple[int, ...] = (3, 3, 3, 4)):
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 24, 2), _conv(24, 24))
        self.pyramid = nn.ModuleList(
            nn.Sequential(_conv(cin, cout, 2), _conv(cout, cout))
            for cin, cout in zip((24, *widths[:-1]), widths, strict=True)
        )
        self.levels = nn.ModuleList(_Level(w, r, 64) for w, r in zip(widths, radii, strict=True))

    def features(self, frames: Tensor) -> list[Tensor]:
        """``frames [n, 3, H, W]`` in 0..1, H and W multiples of 32 -> feature maps at 1/4, 1/8, 1/16, 1/32."""
        h = self.stem(frames * 2 - 1)
        out = []
        for stage in self.pyramid:
            h = stage(h)
            out.append(h)
        return [f / (f.float().square().mean(1, keepdim=True) + 1e-4).sqrt().to(f.dtype) for f in out]

    def match(self, first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        """Flow at 1/32 to 1/4 of the frames' size, coarse first, each ``[n, 2, h, w]`` in pixels of its own scale."""
        n, _, h, w = first[-1].shape
        flow = first[-1].new_zeros(n, 2, h, w, dtype=torch.float32)
        state = first[-1].new_zeros(n, 16, h, w)
        flows: list[Tensor] = []
        for level, a, b in zip(reversed(self.levels), reversed(first), reversed(second), strict=True):
            if flow.shape[-2:] != a.shape[-2:]:
                flow = 2 * F.interpolate(flow, size=a.shape[-2:], mode="bilinear", align_corners=False)
                state = F.interpolate(state, size=a.shape[-2:], mode="bilinear", align_corners=False)
            flow, state = level(a, b, flow, state)
            flows.append(flow)
        return flows


def _pad32(frames: Tensor) -> Tensor:
    h, w = frames.shape[-2:]
    return F.pad(frames, (0, -w % 32, 0, -h % 32), mode="replicate")


@torch.no_grad()
def flow_both_ways(net: FlowNet, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Optical flow between each frame but the first and the one before it.

    Args:
        net: the flow network.
        frames: ``[n + 1, 3, H, W]`` in 0..1, consecutive.

    Returns:
        Two tensors ``[n, 2, ceil(H / 4), ceil(W / 4)]`` in pixels at that quarter scale: from each frame to its
        predecessor, and back.
    """
    h, w = frames.shape[-2:]
    features = net.features(_pad32(frames))
    first, second = ([torch.cat(pair) for pair in zip(x, y, strict=True)] for x, y in _both_orders(features))
    flow = net.match(first, second)[-1][..., : -(-h // STRIDE), : -(-w // STRIDE)]
    to_previous, back = rearrange(flow, "(p n) c h w -> p n c h w", p=2)
    return to_previous.contiguous(), back.contiguous()


def _both_orders(features: list[Tensor]) -> tuple[tuple, tuple]:
    now, before = [f[1:] for f in features], [f[:-1] for f in features]
    return (now, before), (before, now)


def load_flow(device: torch.device, path: Path = BUNDLED) -> FlowNet:
    """The flow network bundled in veo-mini's file, for any backbone. Raises ModelError when it is not there."""
    net = FlowNet()
    try:
        with safe_open(path, "pt") as file:
            net.load_state_dict(
                {k.removeprefix("flow."): file.get_tensor(k).float() for k in file.keys() if k.startswith("flow.")}
            )
    except (OSError, SafetensorError, RuntimeError) as e:
        raise ModelError(
            f"{path} does not hold the optical flow network ({str(e).splitlines()[0]}); reinstall the pack"
        ) from e
    return net.to(device).eval().requires_grad_(False)
