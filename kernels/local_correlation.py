"""Local correlation of two feature maps: what optical flow compares (Fischer et al. 2015, eq. 1, with patches of one pixel)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import cdiv, is_traced, jit, next_power_of_2, notice_first_use, on_its_device, runs_on, tl

# Elements of a program.
MOST = 2048


def local_correlation(a: Tensor, b: Tensor, radius: int) -> Tensor:
    """Cosine-like similarity of each position of ``a`` with a square neighbourhood in ``b``.

    Args:
        a, b: ``[n, C, H, W]`` of any floating dtype.
        radius: of the square, in positions.

    Returns:
        ``[n, (2 radius + 1)^2, H, W]`` in the dtype of ``a``, row by row: channel means of the products, 0 outside ``b``.
    """
    if runs_on(a, b):
        run = torch.ops.veostyle.local_correlation if is_traced(a) else launch_correlation
        return run(a, b, radius)
    h, w = a.shape[-2:]
    b = F.pad(b, [radius] * 4)
    span = range(2 * radius + 1)
    return torch.stack([(a * b[..., y : y + h, x : x + w]).mean(1) for y in span for x in span], dim=1)


@jit
def _correlate(
    a, b, out, a_n, a_c, a_y, a_x, b_n, b_c, b_y, b_x, out_n, out_k, out_y, out_x, height, width, channels,
    SPAN: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    x, c = tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.arange(0, CHANNELS)
    y, row = tl.program_id(1) % height, tl.program_id(1) // height
    n = tl.program_id(2).to(tl.int64)
    inside = (x < width)[:, None] & (c < channels)[None, :]
    mine = tl.load(a + n * a_n + y * a_y + x[:, None] * a_x + c[None, :] * a_c, mask=inside, other=0.0).to(tl.float32)
    mine = mine / channels
    their_y = y + row - SPAN // 2
    there = inside & (their_y >= 0) & (their_y < height)
    b += n * b_n + their_y * b_y
    out += n * out_n + y * out_y + row * SPAN * out_k
    for i in tl.static_range(SPAN):
        their_x = x + i - SPAN // 2
        read = there & ((their_x >= 0) & (their_x < width))[:, None]
        theirs = tl.load(b + their_x[:, None] * b_x + c[None, :] * b_c, mask=read, other=0.0).to(tl.float32)
        tl.store(out + i * out_k + x * out_x, tl.sum(mine * theirs, 1).to(out.dtype.element_ty), mask=x < width)


def _empty(a: Tensor, radius: int) -> Tensor:
    n, _, height, width = a.shape
    last = a.is_contiguous(memory_format=torch.channels_last) and not a.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty((n, (2 * radius + 1) ** 2, height, width), dtype=a.dtype, device=a.device, memory_format=layout)


@on_its_device
def launch_correlation(a: Tensor, b: Tensor, radius: int) -> Tensor:
    """:func:`local_correlation` by the kernel."""
    notice_first_use("local correlation")
    n, channels, height, width = a.shape
    out = _empty(a, radius)
    padded = next_power_of_2(channels)
    wide = max(16, MOST // padded)
    _correlate[(cdiv(width, wide), height * (2 * radius + 1), n)](
        a, b, out, *a.stride(), *b.stride(), *out.stride(), height, width, channels,
        SPAN=2 * radius + 1, CHANNELS=padded, WIDE=wide,
    )  # fmt: skip
    return out


@torch.library.custom_op("veostyle::local_correlation", mutates_args=())
def _correlation_operator(a: Tensor, b: Tensor, radius: int) -> Tensor:
    return launch_correlation(a, b, radius)


@_correlation_operator.register_fake
def _(a: Tensor, b: Tensor, radius: int) -> Tensor:
    return _empty(a, radius)
