"""Keys and values at 4 bits; 5 bits an element with their scales, from heads of 32 channels and full groups of tokens on.

After KIVI (Liu et al. 2024): keys are quantised per channel over groups of tokens, since a few of their channels are large
throughout; values per token over groups of channels. Each group keeps its lowest value and a step of a fifteenth of its range.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ._triton import INTERPRETED, cdiv, jit, next_power_of_2, on_its_device, runs_on, tl

GROUP = 32


@dataclass(frozen=True)
class PackedKV:
    """Keys and values of m tokens.

    Attributes:
        k, v: uint8 ``[..., m, d / 2]``, channels 2i and 2i + 1 in the low and high half of byte i.
        k_step, k_low: half precision ``[..., ceil(m / 32), d]``.
        v_step, v_low: half precision ``[..., m, groups]``.
    """

    k: Tensor
    k_step: Tensor
    k_low: Tensor
    v: Tensor
    v_step: Tensor
    v_low: Tensor

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values())


def pack(k: Tensor, v: Tensor) -> PackedKV:
    """Quantises ``[..., m, d]`` in half precision, d even."""
    m, d = k.shape[-2:]
    if not m or d % 2:
        raise ValueError(f"keys of shape {tuple(k.shape)} cannot be packed; give a token or more and an even head size")
    padded = torch.nn.functional.pad(rearrange(k, "... m d -> ... d m"), (0, -m % GROUP), mode="constant", value=0)
    # A short last group is filled by its own last token, which moves neither end of its range.
    padded[..., m:] = k[..., m - 1, :, None]
    keys, k_step, k_low = _quantised(padded.unflatten(-1, (-1, GROUP)))
    keys = rearrange(keys, "... d g n -> ... (g n) d")[..., :m, :]
    values, v_step, v_low = _quantised(v.unflatten(-1, (-1, _value_group(d))))
    k_step, k_low = (rearrange(x, "... d g -> ... g d").contiguous() for x in (k_step, k_low))
    return PackedKV(_bytes(keys), k_step, k_low, _bytes(values.flatten(-2)), v_step, v_low)


def unpack(packed: PackedKV) -> tuple[Tensor, Tensor]:
    """Keys and values ``[..., m, d]`` in the dtype that was packed; by a kernel on CUDA."""
    if runs_on(packed.k):
        return launch_unpack(packed)
    m, d = packed.k.shape[-2], 2 * packed.k.shape[-1]
    k_step, k_low = (x.repeat_interleave(GROUP, -2)[..., :m, :] for x in (packed.k_step, packed.k_low))
    v_step, v_low = (x.repeat_interleave(_value_group(d), -1) for x in (packed.v_step, packed.v_low))
    k, v = (torch.stack([x & 15, x >> 4], -1).flatten(-2).float() for x in (packed.k, packed.v))
    dtype = packed.k_step.dtype
    k, v = k * k_step.float() + k_low.float(), v * v_step.float() + v_low.float()
    # A range as wide as the dtype's own, in steps that are rounded, may end a little beyond it.
    most = torch.finfo(dtype).max
    return k.clamp(-most, most).to(dtype), v.clamp(-most, most).to(dtype)


def _value_group(d: int) -> int:
    """Channels of a group of values: 32, or the whole head where that does not divide it."""
    return GROUP if d % GROUP == 0 else d


def _quantised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 uint8 over the last dimension, and the steps and lowest values without it."""
    low, high = x.float().aminmax(dim=-1)
    low = low.to(x.dtype)
    step = ((high - low.float()) / 15).to(x.dtype)
    # A group of equal values has no range: its codes are 0.
    safe = torch.where(step == 0, 1.0, step.float())
    codes = ((x.float() - low.float()[..., None]) / safe[..., None]).round().clamp(0, 15)
    return codes.byte(), step, low


def _bytes(codes: Tensor) -> Tensor:
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).contiguous()


@jit
def _unpack(
    packed, step, low, out, rows, tokens, most, D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, PADDED // 2)
    inside = (row[:, None] < rows) & (byte[None, :] < D // 2)
    codes = tl.load(packed + row[:, None].to(tl.int64) * (D // 2) + byte[None, :], mask=inside, other=0)
    codes = tl.join(codes & 15, codes >> 4).reshape(ROWS, PADDED).to(tl.float32)
    channel = tl.arange(0, PADDED)
    if PER_CHANNEL:
        # A group of tokens never crosses from one head's run of tokens into the next.
        groups = tl.cdiv(tokens, GROUP)
        place = ((row // tokens) * groups + row % tokens // GROUP)[:, None].to(tl.int64) * D + channel[None, :]
    else:
        place = row[:, None].to(tl.int64) * (D // GROUP) + channel[None, :] // GROUP
    inside = (row[:, None] < rows) & (channel[None, :] < D)
    steps = tl.load(step + place, mask=inside, other=0.0).to(tl.float32)
    lows = tl.load(low + place, mask=inside, other=0.0).to(tl.float32)
    place = out + row[:, None].to(tl.int64) * D + channel[None, :]
    value = tl.minimum(tl.maximum(codes * steps + lows, -most), most)
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@on_its_device
def launch_unpack(packed: PackedKV) -> tuple[Tensor, Tensor]:
    """:func:`unpack` by the kernel."""
    m, d = packed.k.shape[-2], 2 * packed.k.shape[-1]
    rows = packed.k.numel() // (d // 2)
    block = 16 if INTERPRETED else 32
    out = []
    for x, step, low, per_channel in (
        (packed.k, packed.k_step, packed.k_low, True),
        (packed.v, packed.v_step, packed.v_low, False),
    ):
        y = torch.empty(*x.shape[:-1], d, dtype=step.dtype, device=x.device)
        _unpack[(cdiv(rows, block),)](
            x, step, low, y, rows, m, torch.finfo(step.dtype).max, D=d, PADDED=next_power_of_2(d), ROWS=block,
            PER_CHANNEL=per_channel,
            GROUP=GROUP if per_channel else _value_group(d),
        )  # fmt: skip
        out.append(y)
    return out[0], out[1]
