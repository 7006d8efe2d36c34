"""Reflected borders for convolutions in one pass, with what comes before: SiLU, or bilinear doubling.

PyTorch's reflection forgets channels-last: around a convolution of half precision it costs three passes more than this.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import cdiv, is_traced, jit, next_power_of_2, notice_first_use, on_its_device, runs_on, tl

# Elements of a program.
MOST = 4096


def reflect_pad(h: Tensor, silu: bool = False, double: bool = False) -> Tensor:
    """Features with one reflected pixel on every side.

    Args:
        h: ``[n, C, H, W]`` of any floating dtype, H and W at least 2.
        silu: takes SiLU of them first. double: doubles them bilinearly first, pixel centres at halves.

    Returns:
        ``[n, C, H + 2, W + 2]``, or twice H and W and 2 more, in the dtype and memory format of ``h``.
    """
    if runs_on(h) and h.is_contiguous(memory_format=torch.channels_last):
        return torch.ops.veostyle.reflect_pad(h, silu, double) if is_traced(h) else launch_reflect(h, silu, double)
    h = F.silu(h) if silu else h
    h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False) if double else h
    return F.pad(h, (1, 1, 1, 1), mode="reflect")


@jit
def _load(x, y, place_x, c, width, channels, inside, SILU: tl.constexpr):
    value = tl.load(x + (y * width + place_x)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return value / (1 + tl.exp(-value)) if SILU else value


@jit
def _reflect(
    x, out, height, width, channels,
    SILU: tl.constexpr, DOUBLE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(2).to(tl.int64)
    p, c = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tall, wide = height * (2 if DOUBLE else 1), width * (2 if DOUBLE else 1)
    inside = (p < (tall + 2) * (wide + 2))[:, None] & (c < channels)[None, :]
    to_y, to_x = tl.abs(p // (wide + 2) - 1), tl.abs(p % (wide + 2) - 1)
    # What lies below the last row of the grid is masked, and must not be read from a row that is not there.
    to_y, to_x = tl.minimum(to_y, 2 * tall - 2 - to_y), tl.minimum(to_x, 2 * wide - 2 - to_x)
    to_y = tl.maximum(to_y, 0).to(tl.int64)
    x += n * height * width * channels
    if DOUBLE:
        y, at_x = to_y // 2, to_x // 2
        next_y = tl.minimum(tl.maximum(y + 2 * (to_y % 2) - 1, 0), height - 1)
        next_x = tl.minimum(tl.maximum(at_x + 2 * (to_x % 2) - 1, 0), width - 1)
        near = 0.75 * _load(x, y, at_x, c, width, channels, inside, SILU)
        near += 0.25 * _load(x, y, next_x, c, width, channels, inside, SILU)
        far = 0.75 * _load(x, next_y, at_x, c, width, channels, inside, SILU)
        far += 0.25 * _load(x, next_y, next_x, c, width, channels, inside, SILU)
        value = 0.75 * near + 0.25 * far
    else:
        value = _load(x, to_y, to_x, c, width, channels, inside, SILU)
    out += n * (tall + 2) * (wide + 2) * channels
    place = out + p.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


def _shape(h: Tensor, double: bool) -> tuple[int, int, int, int]:
    n, channels, height, width = h.shape
    factor = 2 if double else 1
    return n, channels, factor * height + 2, factor * width + 2


@on_its_device
def launch_reflect(h: Tensor, silu: bool = False, double: bool = False) -> Tensor:
    """:func:`reflect_pad` by the kernel, of features that are channels-last."""
    notice_first_use("reflected borders")
    n, channels, height, width = h.shape
    out = torch.empty(_shape(h, double), dtype=h.dtype, device=h.device, memory_format=torch.channels_last)
    wide = min(next_power_of_2(channels), 64)
    pixels = MOST // wide
    _reflect[(cdiv(out.shape[2] * out.shape[3], pixels), cdiv(channels, wide), n)](
        h, out, height, width, channels, SILU=silu, DOUBLE=double, PIXELS=pixels, CHANNELS=wide
    )
    return out


@torch.library.custom_op("veostyle::reflect_pad", mutates_args=())
def _reflect_operator(h: Tensor, silu: bool, double: bool) -> Tensor:
    return launch_reflect(h, silu, double)


@_reflect_operator.register_fake
def _(h: Tensor, silu: bool, double: bool) -> Tensor:
    return torch.empty(_shape(h, double), dtype=h.dtype, device=h.device, memory_format=torch.channels_last)
