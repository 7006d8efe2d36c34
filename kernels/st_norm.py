"""ST-Norm and group norm with SiLU in two passes over the features: one takes moments, one applies affine and activation.

Between the passes stand only ``[n, C]`` numbers, so that any normalisation (per frame, per clip, blended, by groups) is the
same two kernels. NCHW and channels-last; sums in float32.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import INTERPRETED, cdiv, is_traced, jit, next_power_of_2, notice_first_use, on_its_device, runs_on, tl

# Elements of a group that one program holds in registers.
AT_ONCE = 256 if INTERPRETED else 1 << 14


def channel_moments(h: Tensor) -> Tensor:
    """Raw moments over space.

    Args:
        h: ``[n, C, H, W]`` of any floating dtype.

    Returns:
        float32 ``[n, 2, C]``: mean of h and mean of h squared.
    """
    if runs_on(h):
        return torch.ops.veostyle.channel_moments(h) if is_traced(h) else launch_moments(h)
    h = h.float()
    return torch.stack([h.mean((-2, -1)), h.square().mean((-2, -1))], dim=1)


def affine_act(h: Tensor, scale: Tensor, shift: Tensor, silu: bool = False, residual: Tensor | None = None) -> Tensor:
    """``act(h * scale + shift) + residual``, computed in float32.

    Args:
        h, residual: ``[n, C, H, W]``.
        scale, shift: float32 ``[n, C]``.
        silu: SiLU as the activation, or none.

    Returns:
        The shape, dtype and memory format of ``h``.
    """
    if runs_on(h, scale, shift, residual):
        run = torch.ops.veostyle.affine_act if is_traced(h) else launch_affine
        return run(h, scale, shift, silu, residual)
    out = torch.addcmul(shift[..., None, None], h.to(shift.dtype), scale[..., None, None])
    out = F.silu(out) if silu else out
    return (out if residual is None else out + residual).to(h.dtype)


def group_affine(moments: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Group norm (Wu and He 2018) as an affine map of each channel.

    Args:
        moments: ``[n, 2, C]`` of :func:`channel_moments`.
        weight, bias: ``[C]``.

    Returns:
        scale and shift, float32 ``[n, C]``.
    """
    channels = moments.shape[-1]
    mean, square = moments.unflatten(-1, (groups, -1)).mean(-1).unbind(1)
    inverse = (square - mean.square()).clamp(min=0).add(eps).rsqrt()
    mean, inverse = (x.repeat_interleave(channels // groups, -1) for x in (mean, inverse))
    scale = inverse * weight.float()
    return scale, bias.float() - mean * scale


def group_norm(
    h: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool = False, added: Tensor | None = None
) -> Tensor:
    """PyTorch's group norm and, where asked, SiLU.

    Args:
        h: ``[n, C, H, W]``.
        weight, bias: ``[C]``.
        added: ``[n, C]``, added to every pixel before; it costs no pass, since it moves the moments alone.

    Returns:
        The shape, dtype and memory format of ``h``.
    """
    if runs_on(h, weight, bias, added):
        run = torch.ops.veostyle.group_norm if is_traced(h) else launch_group_norm
        return run(h, groups, weight, bias, eps, silu, added)
    out = F.group_norm(h if added is None else h + added[..., None, None], groups, weight, bias, eps)
    return F.silu(out) if silu else out


@jit
def _moments(
    x, out, n_step, c_step, p_step, channels, pixels, chunk,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, EVEN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    # What lies side by side in memory is the tile's second dimension, or Triton turns every tile around.
    over: tl.constexpr = 0 if LAST else 1
    split, n = tl.program_id(0), tl.program_id(2)
    c, p = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PIXELS)
    x += n.to(tl.int64) * n_step
    # Differences from a pixel of the channel's own: a mean far from 0 would swallow the deviations.
    origin = tl.load(x + c.to(tl.int64) * c_step, mask=c < channels, other=0.0).to(tl.float32)
    at_c, at_p = tl.expand_dims(c, over), tl.expand_dims(p, 1 - over)
    sums = tl.zeros([PIXELS, CHANNELS] if LAST else [CHANNELS, PIXELS], tl.float32)
    squares = tl.zeros_like(sums)
    first = split * chunk
    last = min(first + chunk, pixels)
    for begin in range(first, last, PIXELS):
        place = x + at_c.to(tl.int64) * c_step + (begin + at_p).to(tl.int64) * p_step
        if EVEN:
            value = tl.load(place).to(tl.float32) - tl.expand_dims(origin, over)
        else:
            inside = (at_c < channels) & (begin + at_p < last)
            value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value - tl.expand_dims(origin, over), 0.0)
        sums += value
        squares += value * value
    place = out + (n * tl.num_programs(0) + split) * 2 * channels + c
    tl.store(place, tl.sum(sums, over), mask=c < channels)
    tl.store(place + channels, tl.sum(squares, over), mask=c < channels)


@jit
def _group_affine(
    x, partial, weight, bias, added, scale, shift, n_step, c_step, splits, channels, pixels, eps,
    PER: tl.constexpr, PER_PADDED: tl.constexpr, SPLITS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    g, n = tl.program_id(0), tl.program_id(1)
    own, s = tl.arange(0, PER_PADDED), tl.arange(0, SPLITS)
    c, there = g * PER + own, own < PER
    place = partial + (n * splits + s[:, None]) * 2 * channels + c[None, :]
    inside = (s[:, None] < splits) & there[None, :]
    means = tl.sum(tl.load(place, mask=inside, other=0.0), 0) / pixels
    variances = tl.sum(tl.load(place + channels, mask=inside, other=0.0), 0) / pixels - means * means
    origin = x + n.to(tl.int64) * n_step + c.to(tl.int64) * c_step
    means += tl.load(origin, mask=there, other=0.0).to(tl.float32)
    offset = tl.zeros([PER_PADDED], tl.float32)
    if ADDED:
        offset = tl.load(added + n * channels + c, mask=there, other=0.0).to(tl.float32)
        means += offset
    mean = tl.sum(tl.where(there, means, 0.0)) / PER
    apart = tl.where(there, means - mean, 0.0)
    variance = tl.sum(tl.where(there, variances, 0.0) + apart * apart) / PER
    inverse = 1 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
    factor = inverse * tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    rest = tl.load(bias + c, mask=there, other=0.0).to(tl.float32) + (offset - mean) * factor
    tl.store(scale + n * channels + c, factor, mask=there)
    tl.store(shift + n * channels + c, rest, mask=there)


@jit
def _group_norm(
    x, weight, bias, added, out, n_step, c_step, p_step, channels, pixels, eps,
    PER: tl.constexpr, PER_PADDED: tl.constexpr, PIXELS: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """A whole group at once: read once, written once."""
    g, n = tl.program_id(0), tl.program_id(1)
    own, p = tl.arange(0, PER_PADDED), tl.arange(0, PIXELS)
    c, there = g * PER + own, own < PER
    inside = there[:, None] & (p[None, :] < pixels)
    at = n.to(tl.int64) * n_step + c[:, None].to(tl.int64) * c_step + p[None, :].to(tl.int64) * p_step
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + n * channels + c, mask=there, other=0.0).to(tl.float32)[:, None]
    count = PER * pixels
    mean = tl.sum(tl.where(inside, value, 0.0)) / count
    value -= mean
    inverse = 1 / tl.sqrt(tl.sum(tl.where(inside, value * value, 0.0)) / count + eps)
    factor = inverse * tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    value = value * factor[:, None] + tl.load(bias + c, mask=there, other=0.0).to(tl.float32)[:, None]
    if SILU:
        value = value / (1 + tl.exp(-value))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@jit
def _affine(
    x, scale, shift, residual, out, n_step, c_step, p_step, channels, pixels,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    # Backwards: what the pass before read last is still in the cache.
    n = tl.num_programs(2) - 1 - tl.program_id(2)
    c = (tl.num_programs(1) - 1 - tl.program_id(1)) * CHANNELS + tl.arange(0, CHANNELS)
    p = (tl.num_programs(0) - 1 - tl.program_id(0)) * PIXELS + tl.arange(0, PIXELS)
    inside = (c[:, None] < channels) & (p[None, :] < pixels)
    at = n.to(tl.int64) * n_step + c[:, None].to(tl.int64) * c_step + p[None, :].to(tl.int64) * p_step
    factor = tl.load(scale + n * channels + c, mask=c < channels, other=0.0)
    rest = tl.load(shift + n * channels + c, mask=c < channels, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor[:, None] + rest[:, None]
    if SILU:
        value = value / (1 + tl.exp(-value))
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _steps(h: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor whose pixels are evenly spaced, and its steps over frames, channels and pixels."""
    if not h.is_contiguous() and not h.is_contiguous(memory_format=torch.channels_last):
        h = h.contiguous()
    _, c, height, width = h.shape
    last = not h.is_contiguous()
    return (h, c * height * width, 1, c) if last else (h, c * height * width, height * width, 1)


@functools.cache
def _tile(channels: int, pixels: int, c_step: int) -> dict[str, int]:
    """Channels and pixels of a program: runs of memory first, 4,096 elements or less."""
    most = 1024 if INTERPRETED else 4096
    if c_step == 1:
        wide = min(next_power_of_2(channels), most, 64)
        return {"CHANNELS": wide, "PIXELS": min(next_power_of_2(pixels), most // wide)}
    long = min(next_power_of_2(pixels), most)
    return {"CHANNELS": min(next_power_of_2(channels), max(1, most // 2 // long)), "PIXELS": long}


def _partial_sums(h: Tensor, n_step: int, c_step: int, p_step: int) -> Tensor:
    """float32 ``[n, splits, 2, C]``: sums and sums of squares over runs of pixels, less the channel's first pixel."""
    notice_first_use("group norm, ST-Norm")
    n, channels, height, width = h.shape
    pixels = height * width
    tile = _tile(channels, pixels, c_step)
    blocks = cdiv(channels, tile["CHANNELS"])
    # Enough programs to fill any chip, each with a few tiles. How a frame is split must not depend on how many there are.
    splits = max(1, min(cdiv(pixels, 4 * tile["PIXELS"]), 256, cdiv(4096, blocks)))
    chunk = cdiv(cdiv(pixels, splits), tile["PIXELS"]) * tile["PIXELS"]
    splits = cdiv(pixels, chunk)
    out = torch.empty(n, splits, 2, channels, device=h.device)
    even = pixels % tile["PIXELS"] == 0 and channels % tile["CHANNELS"] == 0
    _moments[(splits, blocks, n)](
        h, out, n_step, c_step, p_step, channels, pixels, chunk, EVEN=even, LAST=c_step == 1, **tile
    )
    return out


def _apply(
    h: Tensor, steps: Sequence[int], scale: Tensor, shift: Tensor, silu: bool, residual: Tensor | None
) -> Tensor:
    """The second pass; scale and shift are contiguous, the residual as h in memory."""
    n, channels, height, width = h.shape
    pixels = height * width
    out = torch.empty_like(h)
    tile = _tile(channels, pixels, steps[1])
    _affine[(cdiv(pixels, tile["PIXELS"]), cdiv(channels, tile["CHANNELS"]), n)](
        h, scale, shift, h if residual is None else residual, out, *steps, channels, pixels,
        SILU=silu, RESIDUAL=residual is not None, **tile,
    )  # fmt: skip
    return out


@on_its_device
def launch_moments(h: Tensor) -> Tensor:
    """:func:`channel_moments` by the kernel."""
    h, *steps = _steps(h)
    mean, square = (_partial_sums(h, *steps).sum(1) / h[0, 0].numel()).unbind(1)
    origin = h[..., 0, 0].float()
    return torch.stack([mean + origin, square + 2 * origin * mean + origin**2], 1)


@on_its_device
def launch_affine(h: Tensor, scale: Tensor, shift: Tensor, silu: bool, residual: Tensor | None = None) -> Tensor:
    """:func:`affine_act` by the kernel."""
    h, *steps = _steps(h)
    scale, shift = (x.expand(h.shape[:2]).contiguous() for x in (scale, shift))
    if residual is not None:
        layout = torch.contiguous_format if h.is_contiguous() else torch.channels_last
        residual = residual.contiguous(memory_format=layout)
    return _apply(h, steps, scale, shift, silu, residual)


@on_its_device
def launch_group_norm(
    h: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool, added: Tensor | None = None
) -> Tensor:
    """:func:`group_norm` by the kernels: one where a group fits into a program's registers, else three."""
    h, *steps = _steps(h)
    n, channels, height, width = h.shape
    per, pixels = channels // groups, height * width
    per_padded, pixels_padded = next_power_of_2(per), next_power_of_2(pixels)
    if per_padded * pixels_padded <= AT_ONCE:
        out = torch.empty_like(h)
        _group_norm[(groups, n)](
            h, weight, bias, weight if added is None else added.contiguous(), out, *steps, channels, pixels, eps,
            PER=per, PER_PADDED=per_padded, PIXELS=pixels_padded, SILU=silu, ADDED=added is not None,
            num_warps=min(16, max(1, per_padded * pixels_padded // 1024)),
        )  # fmt: skip
        return out
    partial = _partial_sums(h, *steps)
    splits = partial.shape[1]
    scale, shift = torch.empty(2, n, channels, device=h.device).unbind(0)
    _group_affine[(groups, n)](
        h, partial, weight, bias, weight if added is None else added.contiguous(), scale, shift, *steps[:2], splits, channels,
        float(pixels), eps, PER=per, PER_PADDED=per_padded,
        SPLITS=next_power_of_2(splits), ADDED=added is not None,
    )  # fmt: skip
    return _apply(h, steps, scale, shift, silu, None)


@torch.library.custom_op("veostyle::channel_moments", mutates_args=())
def _channel_moments(h: Tensor) -> Tensor:
    return launch_moments(h)


@_channel_moments.register_fake
def _(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], 2, h.shape[1], dtype=torch.float32)


@torch.library.custom_op("veostyle::affine_act", mutates_args=())
def _affine_act(h: Tensor, scale: Tensor, shift: Tensor, silu: bool, residual: Tensor | None = None) -> Tensor:
    return launch_affine(h, scale, shift, silu, residual)


@_affine_act.register_fake
def _(h: Tensor, scale: Tensor, shift: Tensor, silu: bool, residual: Tensor | None = None) -> Tensor:
    return torch.empty_like(_steps(h)[0])


@torch.library.custom_op("veostyle::group_norm", mutates_args=())
def _group_norm_operator(
    h: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool, added: Tensor | None = None
) -> Tensor:
    return launch_group_norm(h, groups, weight, bias, eps, silu, added)


@_group_norm_operator.register_fake
def _(
    h: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool, added: Tensor | None = None
) -> Tensor:
    return torch.empty_like(_steps(h)[0])
