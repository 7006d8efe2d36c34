"""Attention of frames over other frames of the batch and shared style tokens, read in place through an index table.

After FlashAttention (Dao et al. 2022): keys and values pass once, block by block, with a running softmax. What is new is
only where they are read from: frame ``sources[t, s]`` for each source s, so that nothing is gathered. The kernel here
runs on any chip that Triton knows; Hopper has one of its own beside it.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from . import cross_frame_attention_hopper as hopper
from ._triton import INTERPRETED, TritonError, is_traced, jit, notice_first_use, on_its_device, runs_on, tl, triton
from ._triton import state as triton_state
from .tuning import Settings, best

MOST_CHANNELS = 256
LEAST_WEIGHT = 1e-30
LOG2_E = math.log2(math.e)


def cross_frame_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None = None,
    style_v: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    temperature: float = 1.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Attention of every frame over its source frames and the style's tokens.

    On a CUDA device in half precision, without gradients, it is a Triton kernel that reads the sources where they are;
    elsewhere :func:`reference`, which gathers them.

    Args:
        q, k, v: ``[b, t, heads, n, d]``, any strides.
        sources: int64 ``[t, s]``, indices of frames in 0..t - 1. A frame listed twice counts twice.
        style_k, style_v: ``[b, heads, m, d]``, shared by all frames.
        weights: float32 ``[s + 1]``, above 0: how much a token of each source counts, the style's last. The attention is
            the convex mix of the groups' that these weights and the groups' own sums give.
        temperature: factor on the logits, above 0.
        kept: int32 ``[b, t, heads, query blocks, count]``: the distinct blocks of keys that each block of queries reads,
            source by source, as of :func:`.block_mask.choose_blocks`; the style's tokens are always read.

    Returns:
        ``[b, t, heads, n, d]`` in q's dtype.
    """
    scale = temperature * q.shape[-1] ** -0.5
    if style_k is not None and not style_k.shape[2]:
        style_k = style_v = None
    given = (style_k, style_v, weights)
    if not (takes(q, k, v) and runs_on(q, *given) and sources.numel() and (kept is None or kept.numel())):
        return reference(q, k, v, sources, style_k, style_v, weights=weights, temperature=temperature, kept=kept)
    run = torch.ops.veostyle.cross_frame_attention if is_traced(q) else launch
    return run(q, k, v, sources, style_k, style_v, weights, kept, scale)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None = None,
    style_v: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    temperature: float = 1.0,
    kept: Tensor | None = None,
) -> Tensor:
    """The same by PyTorch's own attention over gathered keys and values."""
    b, t, _, n, d = q.shape
    style = 0 if style_k is None else style_k.shape[2]

    def gathered(x: Tensor, style: Tensor | None) -> Tensor:
        x = rearrange(x[:, sources], "b t s h n d -> (b t) h (s n) d")
        return x if style is None else torch.cat([x, style.repeat_interleave(t, dim=0)], dim=2)

    mask = None
    if weights is not None:
        counts = torch.tensor([n] * sources.shape[1] + [style], device=q.device)
        mask = weights.to(q.dtype).log().repeat_interleave(counts)[None, None, None]
    if kept is not None:
        read = _read_tokens(kept, n, sources.shape[1], block_sizes(d)).flatten(0, 1)
        read = F.pad(read, (0, style), value=True)
        mask = torch.where(read, 0.0 if mask is None else mask, float("-inf")).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1), gathered(k, style_k), gathered(v, style_v), mask, scale=temperature * d**-0.5
    )
    return out.unflatten(0, (b, t))


def _read_tokens(kept: Tensor, tokens: int, sources: int, sizes: tuple[int, int]) -> Tensor:
    """bool ``[b, t, heads, n, s n]``: which keys each query reads."""
    queries, keys = sizes
    blocks = -(-tokens // keys)
    read = torch.zeros(*kept.shape[:-1], sources * blocks, dtype=torch.bool, device=kept.device)
    read.scatter_(-1, kept.long(), True)
    read = read.repeat_interleave(queries, -2)[..., :tokens, :].unflatten(-1, (sources, blocks))
    return read.repeat_interleave(keys, -1)[..., :tokens].flatten(-2)


def block_sizes(d: int) -> tuple[int, int]:
    """Queries and keys of a block, by head size."""
    if hopper.takes(d):
        return hopper.block_sizes(d)
    return _blocks(d)["QUERIES"], _blocks(d)["KEYS"]


def state() -> tuple[str, str]:
    """``triton`` or ``pytorch`` on the current device, and why."""
    return hopper.state() if hopper.state()[0] == "triton" else triton_state()


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a kernel runs on these: half precision on CUDA, heads of up to 256 channels, no gradient to be kept."""
    half = q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    return half and q.shape[-1] <= MOST_CHANNELS and runs_on(q, k, v)


@jit
def _read(base, row, rows, channels, D: tl.constexpr, MASKED: tl.constexpr):
    """A block ``[rows, channels]`` of tokens, zero beyond its end."""
    inside = channels[None, :] < D
    if MASKED:
        inside = inside & (row[:, None] < rows)
    return tl.load(base, mask=inside, other=0.0)


@jit
def _step(
    query, k_place, v_place, k_n, v_n, first, tokens, scale, bias, channels, most, total, sums,
    D: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running softmax."""
    row = first + tl.arange(0, KEYS)
    key = _read(k_place + row[:, None] * k_n + channels[None, :], row, tokens, channels, D, MASKED)
    value = _read(v_place + row[:, None] * v_n + channels[None, :], row, tokens, channels, D, MASKED)
    logits = tl.dot(query, key.T) * scale + bias
    if MASKED:
        logits = tl.where((row < tokens)[None, :], logits, float("-inf"))
    new = tl.maximum(most, tl.max(logits, 1))
    share = tl.exp2(logits - new[:, None])
    fade = tl.exp2(most - new)
    total = total * fade + tl.sum(share, 1)
    return new, total, tl.dot(share.to(value.dtype), value, sums * fade[:, None])


@jit(any_value=("heads", "frames", "style_tokens", "count"))
def _attend(
    q_base, k_base, v_base, style_k, style_v, table, biases, kept, out_base,
    q_b, q_t, q_h, q_n, k_b, k_t, k_h, k_n, v_b, v_t, v_h, v_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
    out_b, out_t, out_h, out_n, heads, frames, tokens, style_tokens, count, scale,
    SOURCES: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, STYLED: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    rows, channels = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, PADDED)
    head, frame = tl.program_id(1) % heads, tl.program_id(1) // heads
    t, b = (frame % frames).to(tl.int64), (frame // frames).to(tl.int64)
    place = q_base + b * q_b + t * q_t + head * q_h + rows[:, None] * q_n + channels[None, :]
    query = _read(place, rows, tokens, channels, D, True)
    k_base += b * k_b + head * k_h
    v_base += b * v_b + head * v_h
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    bias = 0.0
    if SPARSE:
        blocks = tl.cdiv(tokens, KEYS)
        kept += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * count
        for i in range(0, count):
            entry = tl.load(kept + i)
            s = entry // blocks
            source = tl.load(table + t * SOURCES + s)
            if WEIGHTED:
                bias = tl.load(biases + s)
            most, total, sums = _step(
                query, k_base + source * k_t, v_base + source * v_t, k_n, v_n, (entry - s * blocks) * KEYS, tokens,
                scale, bias, channels, most, total, sums, D, KEYS, MASKED,
            )  # fmt: skip
    else:
        for s in range(SOURCES):
            source = tl.load(table + t * SOURCES + s)
            if WEIGHTED:
                bias = tl.load(biases + s)
            for first in range(0, tokens, KEYS):
                most, total, sums = _step(
                    query, k_base + source * k_t, v_base + source * v_t, k_n, v_n, first, tokens,
                    scale, bias, channels, most, total, sums, D, KEYS, MASKED,
                )  # fmt: skip
    if STYLED:
        if WEIGHTED:
            bias = tl.load(biases + SOURCES)
        for first in range(0, style_tokens, KEYS):
            most, total, sums = _step(
                query, style_k + b * sk_b + head * sk_h, style_v + b * sv_b + head * sv_h, sk_n, sv_n, first,
                style_tokens, scale, bias, channels, most, total, sums, D, KEYS, MASKED,
            )  # fmt: skip
    place = out_base + b * out_b + t * out_t + head * out_h + rows[:, None] * out_n + channels[None, :]
    inside = (rows[:, None] < tokens) & (channels[None, :] < D)
    tl.store(place, (sums / total[:, None]).to(query.dtype), mask=inside)


def _blocks(d: int) -> dict[str, int]:
    """Block sizes; few, so that little is compiled."""
    if INTERPRETED:
        return {"QUERIES": 16, "KEYS": 16}
    if d <= 64:
        return {"QUERIES": 128, "KEYS": 64, "num_warps": 4, "num_stages": 3}
    if d <= 128:
        return {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
    return {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}


def _candidates(d: int) -> list[Settings]:
    """Block sizes worth trying; the usual ones first."""
    tried = ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 4, 3), (64, 32, 4, 2), (128, 128, 8, 2))
    names = ("QUERIES", "KEYS", "num_warps", "num_stages")
    usual = _blocks(d)
    return [usual, *(c for c in (dict(zip(names, sizes)) for sizes in tried) if c != usual)]


@on_its_device
def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    scale: float,
) -> Tensor:
    """The kernel for this chip; ``scale`` is the whole factor on the logits, other arguments as above."""
    notice_first_use("cross-frame attention")
    b, t, heads, n, d = q.shape
    out = torch.empty((b, t, n, heads, d), dtype=q.dtype, device=q.device).transpose(2, 3)
    biases = None if weights is None else weights.float().clamp(min=LEAST_WEIGHT).log2()
    given = (q, k, v, sources.contiguous(), style_k, style_v, biases, kept, scale * LOG2_E, out)
    if q.is_cuda and hopper.takes(d, q.device):
        try:
            hopper.launch(*given)
            return out
        except (TritonError, AttributeError, TypeError) as e:
            # Blocks were chosen in the sizes of that kernel.
            if kept is not None:
                raise
            hopper.refuse(e)
    _launch_portable(*given)
    return out


def _launch_portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    biases: Tensor | None,
    kept: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    b, t, heads, n, d = q.shape
    styled = style_k is not None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    style = [x if x.stride(-1) == 1 else x.contiguous() for x in (style_k, style_v)] if styled else [k[:, 0], v[:, 0]]
    tokens, padded = style[0].shape[2] if styled else 0, max(16, triton.next_power_of_2(d))

    def run(blocks: Settings) -> None:
        _attend[(triton.cdiv(n, blocks["QUERIES"]), b * t * heads)](
            q, k, v, *style, sources, q if biases is None else biases, q if kept is None else kept.contiguous(), out,
            *q.stride()[:4], *k.stride()[:4], *v.stride()[:4], *style[0].stride()[:3], *style[1].stride()[:3],
            *out.stride()[:4], heads, t, n, tokens, 0 if kept is None else kept.shape[-1], scale,
            SOURCES=sources.shape[1], D=d, PADDED=padded, MASKED=bool(n % blocks["KEYS"] or tokens % blocks["KEYS"]),
            STYLED=styled, WEIGHTED=biases is not None, SPARSE=kept is not None, **blocks,
        )  # fmt: skip

    # The blocks that are kept were chosen in sizes that must hold.
    if INTERPRETED or kept is not None:
        run(_blocks(d))
    else:
        bucket = f"heads of {padded}, {triton.next_power_of_2(n)} tokens, {q.element_size() * 8} bits"
        run(best("cross-frame attention", bucket, _candidates(d), run))


@torch.library.custom_op("veostyle::cross_frame_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    scale: float,
) -> Tensor:
    return launch(q, k, v, sources, style_k, style_v, weights, kept, scale)


@_operator.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    scale: float,
) -> Tensor:
    b, t, heads, n, d = q.shape
    return q.new_empty((b, t, n, heads, d)).transpose(2, 3)
