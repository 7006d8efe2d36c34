"""Attention of frames over other frames of the batch and shared style tokens, read in place through an index table.

After FlashAttention (Dao et al. 2022): keys and values pass once, block by block, with a running softmax. What is new is
only where they are read from: frame ``sources[t, s]`` for each source s, so that nothing is gathered. The kernel here
runs on any chip that Triton knows; Hopper has one of its own beside it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from . import cross_frame_attention_hopper as hopper
from ._triton import (
    INTERPRETED,
    TritonError,
    are_aligned,
    at_head,
    cdiv,
    is_planned,
    is_traced,
    jit,
    next_power_of_2,
    notice_first_use,
    on_its_device,
    runs_on,
    tl,
)
from ._triton import state as triton_state
from .nearby_tokens import add_nearby, nearby_tokens
from .tuning import Settings, best

MOST_CHANNELS = 256
# Of the reference with tokens nearby: as many logits as a cache holds, but not fewer rows than a product needs.
LOGITS_AT_ONCE, LEAST_ROWS = 1 << 22, 32
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
    affines: tuple[Tensor, Tensor] | None = None,
    nearby: Tensor | None = None,
) -> Tensor:
    """Attention of every frame over its source frames and the style's tokens.

    On a CUDA device in half precision, without gradients, with as many queries as keys a frame, it is a Triton kernel that
    reads the sources where they are; elsewhere :func:`reference`, which gathers them.

    Args:
        q: ``[b, t, heads, n, d]``, any strides. k, v: ``[b, t', heads, n', d]``; of as many frames and tokens, or of others.
        sources: int64 ``[t, s]``, indices of frames of k in 0..t' - 1. A frame listed twice counts twice. The kernels read
            it once where they can: up to 7 sources, no weights, no chosen blocks, and on Hopper no affines.
        style_k, style_v: ``[b, heads, m, d]``, shared by all frames.
        weights: float32 ``[s + 1]``, above 0: how much a token of each source counts, the style's last. The attention is
            the convex mix of the groups' that these weights and the groups' own sums give.
        temperature: factor on the logits, above 0.
        kept: int32 ``[b, t, heads, query blocks, count]``: the distinct blocks of keys that each block of queries reads,
            source by source, as of :func:`.block_mask.choose_blocks`; the style's tokens are always read.
        affines: float32 ``[b, t, heads, 3, d]`` and ``[b, t', heads, 3, d]``: what :func:`apply_affine` does to each
            frame's queries, and to its keys, before they meet; the style's keys are left alone. AdaIN of queries and
            keys to a picture's statistics (StyleAligned, Hertz et al. 2024, eq. 3) is that. Queries times the keys'
            scales must lie within half precision.
        nearby: int64 ``[t, n, m]``, tokens that each query reads besides, as ``frame * n' + token``; -1 is none. Such as the
            3x3 around where the motion says a token was in the frame before.

    Returns:
        ``[b, t, heads, n, d]`` in q's dtype.

    Raises:
        ValueError: nearby is not of q's frames and tokens.
    """
    if nearby is not None and nearby.shape[:2] != (q.shape[1], q.shape[3]):
        raise ValueError(f"nearby: {list(nearby.shape[:2])} is not {[q.shape[1], q.shape[3]]}, q's frames and tokens")
    scale = temperature * q.shape[-1] ** -0.5
    if style_k is not None and not style_k.shape[2]:
        style_k = style_v = None
    given = (style_k, style_v, weights, *(affines or ()))
    if not (takes(q, k, v) and runs_on(q, *given) and sources.numel() and (kept is None or kept.numel())):
        return reference(
            q, k, v, sources, style_k, style_v, weights=weights, temperature=temperature, kept=kept, affines=affines,
            nearby=nearby,
        )  # fmt: skip
    run = torch.ops.veostyle.cross_frame_attention if is_traced(q) else launch
    return run(q, k, v, sources, style_k, style_v, weights, kept, *(affines or (None, None)), nearby, scale)


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
    affines: tuple[Tensor, Tensor] | None = None,
    nearby: Tensor | None = None,
) -> Tensor:
    """The same by PyTorch's own attention over gathered keys and values."""
    b, t, _, n, d = q.shape
    scale = temperature * d**-0.5
    style = 0 if style_k is None else style_k.shape[2]
    if affines is not None:
        q, k = (apply_affine(x, a) for x, a in zip((q, k), affines, strict=True))
    mask = None
    if weights is not None:
        counts = torch.tensor([k.shape[3]] * sources.shape[1] + [style], device=q.device)
        logs = weights.float().clamp(min=LEAST_WEIGHT).log().to(q.dtype)
        mask = logs.repeat_interleave(counts)[None, None, None]
    if kept is not None:
        read = _read_tokens(kept, n, sources.shape[1], block_sizes(d)).flatten(0, 1)
        read = F.pad(read, (0, style), value=True)
        mask = torch.where(read, 0.0 if mask is None else mask, float("-inf")).to(q.dtype)
    if nearby is not None:
        return _with_nearby(q, k, v, sources, style_k, style_v, mask, nearby, scale)
    keys, values = gathered(k, sources, style_k), gathered(v, sources, style_v)
    return F.scaled_dot_product_attention(q.flatten(0, 1), keys, values, mask, scale=scale).unflatten(0, (b, t))


def _with_nearby(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    mask: Tensor | None,
    nearby: Tensor,
    scale: float,
) -> Tensor:
    """With tokens of each query's own; by some queries at a time, since PyTorch's attention gives no sum to join them to."""
    out = torch.empty_like(q)
    b, frames, heads, n, _ = q.shape
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    style_k, style_v = (None if x is None else x.to(q.dtype) for x in (style_k, style_v))
    for t in range(frames):
        table = sources[t : t + 1]
        keys, values = gathered(k, table, style_k), gathered(v, table, style_v)
        at_once = max(LEAST_ROWS, LOGITS_AT_ONCE // (b * heads * keys.shape[2]))
        for rows in torch.arange(n, device=q.device).split(at_once):
            query, near = q[:, t, :, rows] * scale, nearby[t : t + 1, rows]
            near_k, near_v = (nearby_tokens(x, near)[:, 0] for x in (k, v))
            own = torch.einsum("bhrd,bhrmd->bhrm", query, near_k).masked_fill(near < 0, float("-inf"))
            logits = query @ keys.transpose(-1, -2)
            if mask is not None:
                logits += mask.expand(b * frames, heads, n, -1).unflatten(0, (b, frames))[:, t, :, rows]
            most = torch.maximum(logits.detach().amax(-1), own.detach().amax(-1))[..., None]
            # In place: what this takes is passes over the logits.
            shares, own = logits.sub_(most).exp_(), (own - most).exp()
            sums = shares @ values + torch.einsum("bhrm,bhrmd->bhrd", own, near_v)
            out[:, t, :, rows] = (sums / (shares.sum(-1) + own.sum(-1))[..., None]).to(out.dtype)
            if is_planned(q):
                break
    return out


def gathered(x: Tensor, sources: Tensor, style: Tensor | None = None) -> Tensor:
    """Every frame's sources side by side, and the style's tokens: ``[b, t', heads, n, d]`` -> ``[(b t), heads, (s n) + m, d]``."""
    x = rearrange(x[:, sources], "b t s h n d -> (b t) h (s n) d")
    return x if style is None else torch.cat([x, style.repeat_interleave(len(sources), dim=0)], dim=2)


def apply_affine(x: Tensor, affine: Tensor) -> Tensor:
    """``(x - centre) * scale + shift`` by channel, in single precision, or double where x is.

    The centre stands apart from the shift, so that a mean far above the deviations is taken away and not rounded.

    Args:
        x: ``[..., n, d]``. affine: ``[..., 3, d]``, scale, centre and shift.

    Returns:
        ``[..., n, d]`` in x's dtype.
    """
    scale, centre, shift = affine[..., None, :].unbind(-3)
    return ((x - centre) * scale + shift).to(x.dtype)


def _read_tokens(kept: Tensor, tokens: int, sources: int, sizes: tuple[int, int]) -> Tensor:
    """bool ``[b, t, heads, n, s n]``: which keys each query reads."""
    queries, keys = sizes
    blocks = cdiv(tokens, keys)
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
    """Whether a kernel runs on these: half precision on CUDA, heads of up to 256 channels, no gradient to be kept.

    And of as many queries as keys, which token merging makes fewer.
    """
    half = q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    return half and q.shape[-2:] == k.shape[-2:] == v.shape[-2:] and q.shape[-1] <= MOST_CHANNELS and runs_on(q, k, v)


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
    logits = tl.dot(query, key.T) * scale + bias[:, None]
    if MASKED:
        logits = tl.where((row < tokens)[None, :], logits, float("-inf"))
    new = tl.maximum(most, tl.max(logits, 1))
    share = tl.exp2(logits - new[:, None])
    fade = tl.exp2(most - new)
    total = total * fade + tl.sum(share, 1)
    return new, total, tl.dot(share.to(value.dtype), value, sums * fade[:, None])


@jit
def _moved(query, affine, channels, D: tl.constexpr):
    """Queries after their affine."""
    inside = channels < D
    scale = tl.load(affine + channels, mask=inside, other=0.0)
    centre = tl.load(affine + D + channels, mask=inside, other=0.0)
    shift = tl.load(affine + 2 * D + channels, mask=inside, other=0.0)
    return ((query.to(tl.float32) - centre[None, :]) * scale[None, :] + shift[None, :]).to(query.dtype)


@jit
def _for_source(moved, bias, affine, source, k_frame, channels, scale, D: tl.constexpr, AFFINE: tl.constexpr):
    """Queries that a source's keys are met by, and a bias a row: ``q . (a (k - m) + c) = (a q) . k + q . c - (a q) . m``.

    The bias is of the queries as rounded, here and for the style's keys: what rounding does to them all falls out.
    """
    query = moved
    if AFFINE:
        inside = channels < D
        affine += source * k_frame
        factor = tl.load(affine + channels, mask=inside, other=0.0)
        centre = tl.load(affine + D + channels, mask=inside, other=0.0)
        shift = tl.load(affine + 2 * D + channels, mask=inside, other=0.0)
        whole = moved.to(tl.float32)
        query = (whole * factor[None, :]).to(moved.dtype)
        bias += tl.sum(whole * shift[None, :] - query.to(tl.float32) * centre[None, :], 1) * scale
    return query, bias


@jit
def _times_listed(table, s, source, SOURCES: tl.constexpr):
    """How often a frame is listed; 0 if it already stood earlier in the list."""
    times = 0
    before = 0
    for r in tl.static_range(SOURCES):
        same = (tl.load(table + r) == source).to(tl.int32)
        times += same
        before += tl.where(r < s, same, 0)
    return tl.where(before > 0, 0, times)


@jit(any_value=("heads", "frames", "k_frames", "style_tokens", "count"))
def _attend(
    q_base, k_base, v_base, style_k, style_v, table, biases, kept, q_affine, k_affine, logsums, out_base,
    q_b, q_t, q_h, q_n, k_b, k_t, k_h, k_n, v_b, v_t, v_h, v_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
    out_b, out_t, out_h, out_n, heads, frames, k_frames, tokens, style_tokens, count, scale,
    SOURCES: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, STYLED: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr, AFFINE: tl.constexpr,
    MERGED: tl.constexpr, SUMMED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    rows, channels = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, PADDED)
    head, frame = tl.program_id(1) % heads, tl.program_id(1) // heads
    t, b = (frame % frames).to(tl.int64), (frame // frames).to(tl.int64)
    place = q_base + b * q_b + t * q_t + at_head(head, q_h, ALIGNED) + rows[:, None] * q_n + channels[None, :]
    query = _read(place, rows, tokens, channels, D, True)
    k_base += b * k_b + at_head(head, k_h, ALIGNED)
    v_base += b * v_b + at_head(head, v_h, ALIGNED)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    none = tl.zeros([QUERIES], tl.float32)
    k_frame = heads * 3 * D
    k_affine += (b * k_frames * heads + head) * 3 * D
    if AFFINE:
        query = _moved(query, q_affine + ((b * frames + t) * heads + head) * 3 * D, channels, D)
    if SPARSE:
        blocks = tl.cdiv(tokens, KEYS)
        kept += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * count
        for i in range(0, count):
            entry = tl.load(kept + i)
            s = entry // blocks
            source = tl.load(table + t * SOURCES + s)
            bias = none
            if WEIGHTED:
                bias += tl.load(biases + s)
            one, bias = _for_source(query, bias, k_affine, source, k_frame, channels, scale, D, AFFINE)
            most, total, sums = _step(
                one, k_base + source * k_t, v_base + source * v_t, k_n, v_n, (entry - s * blocks) * KEYS, tokens,
                scale, bias, channels, most, total, sums, D, KEYS, MASKED,
            )  # fmt: skip
    else:
        for s in range(SOURCES):
            source = tl.load(table + t * SOURCES + s)
            bias = none
            last = tokens
            if WEIGHTED:
                bias += tl.load(biases + s)
            elif MERGED:
                # A frame that is listed again is read once, and counts as often as it is listed.
                times = _times_listed(table + t * SOURCES, s, source, SOURCES)
                bias += tl.log2(tl.maximum(times, 1).to(tl.float32))
                last = tl.where(times > 0, tokens, 0)
            one, bias = _for_source(query, bias, k_affine, source, k_frame, channels, scale, D, AFFINE)
            for first in range(0, last, KEYS):
                most, total, sums = _step(
                    one, k_base + source * k_t, v_base + source * v_t, k_n, v_n, first, tokens,
                    scale, bias, channels, most, total, sums, D, KEYS, MASKED,
                )  # fmt: skip
    if STYLED:
        bias = none
        if WEIGHTED:
            bias += tl.load(biases + SOURCES)
        for first in range(0, style_tokens, KEYS):
            most, total, sums = _step(
                query, style_k + b * sk_b + at_head(head, sk_h, ALIGNED),
                style_v + b * sv_b + at_head(head, sv_h, ALIGNED), sk_n, sv_n, first,
                style_tokens, scale, bias, channels, most, total, sums, D, KEYS, MASKED,
            )  # fmt: skip
    if SUMMED:
        tl.store(logsums + ((b * frames + t) * heads + head) * tokens + rows, most + tl.log2(total), mask=rows < tokens)
    place = out_base + b * out_b + t * out_t + at_head(head, out_h, ALIGNED) + rows[:, None] * out_n + channels[None, :]
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
    q_affine: Tensor | None,
    k_affine: Tensor | None,
    nearby: Tensor | None,
    scale: float,
) -> Tensor:
    """The kernel for this chip; ``scale`` is the whole factor on the logits, other arguments as above."""
    notice_first_use("cross-frame attention")
    b, t, heads, n, d = q.shape
    out = torch.empty((b, t, n, heads, d), dtype=q.dtype, device=q.device).transpose(2, 3)
    logsums = None if nearby is None else torch.empty((b, t, heads, n), device=q.device)
    biases = None if weights is None else weights.float().clamp(min=LEAST_WEIGHT).log2()
    affines = None
    if q_affine is not None and k_affine is not None:
        affines = (q_affine.float().contiguous(), k_affine.float().contiguous())
    scale *= LOG2_E
    given = (q, k, v, sources.contiguous(), style_k, style_v, biases, kept, affines, scale, out, logsums)
    if not _launch_hopper(*given):
        _launch_portable(*given)
    if nearby is not None and logsums is not None:
        add_nearby(out, logsums, q, k, v, nearby, affines, scale)
    return out


def _launch_hopper(*given: Any) -> bool:
    """Whether the kernel for Hopper took it."""
    q, kept = given[0], given[7]
    if not q.is_cuda or not hopper.takes(q.shape[-1], q.device):
        return False
    try:
        hopper.launch(*given)
    except (TritonError, AttributeError, TypeError) as e:
        # Blocks were chosen in the sizes of that kernel.
        if kept is not None:
            raise
        hopper.refuse(e)
        return False
    return True


def _launch_portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Tensor,
    style_k: Tensor | None,
    style_v: Tensor | None,
    biases: Tensor | None,
    kept: Tensor | None,
    affines: tuple[Tensor, Tensor] | None,
    scale: float,
    out: Tensor,
    logsums: Tensor | None,
) -> None:
    b, t, heads, n, d = q.shape
    styled = style_k is not None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    style = [x if x.stride(-1) == 1 else x.contiguous() for x in (style_k, style_v)] if styled else [k[:, 0], v[:, 0]]
    tokens, padded = style[0].shape[2] if styled else 0, max(16, next_power_of_2(d))

    def run(blocks: Settings) -> None:
        _attend[(cdiv(n, blocks["QUERIES"]), b * t * heads)](
            q, k, v, *style, sources, q if biases is None else biases, q if kept is None else kept.contiguous(),
            *(affines or (q, q)), q if logsums is None else logsums, out,
            *q.stride()[:4], *k.stride()[:4], *v.stride()[:4], *style[0].stride()[:3], *style[1].stride()[:3],
            *out.stride()[:4], heads, t, k.shape[1], n, tokens, 0 if kept is None else kept.shape[-1], scale,
            SOURCES=sources.shape[1], D=d, PADDED=padded, MASKED=bool(n % blocks["KEYS"] or tokens % blocks["KEYS"]),
            STYLED=styled, WEIGHTED=biases is not None, SPARSE=kept is not None, AFFINE=affines is not None,
            MERGED=1 < sources.shape[1] <= hopper.MOST_MERGED, SUMMED=logsums is not None,
            ALIGNED=are_aligned(q, k, v, out, *style), **blocks,
        )  # fmt: skip

    # The blocks that are kept were chosen in sizes that must hold.
    if INTERPRETED or kept is not None:
        run(_blocks(d))
    else:
        bucket = f"heads of {padded}, {next_power_of_2(n)} tokens, {q.element_size() * 8} bits"
        run(best("cross-frame attention", bucket, _candidates(d), run))


_operator = torch.library.custom_op("veostyle::cross_frame_attention", mutates_args=())(launch)


@_operator.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    b, t, heads, n, d = q.shape
    return q.new_empty((b, t, n, heads, d)).transpose(2, 3)
