"""Cross-frame attention for Hopper: one warp fetches blocks by TMA, two or three warpgroups compute.

The schedule of FlashAttention-3 (Shah et al. 2024): each warpgroup owns 64 queries, issues the next block's logits and this
block's sums together, and takes its softmax while the tensor cores work on the sums; warpgroups drift apart by themselves, so
that one's softmax also hides behind another's products. Written in Gluon, Triton's lower level, which says by hand which warp
does what. TMA fills with zeros what lies outside a tensor, so that no head size and no token count is padded in memory.
"""

import functools
import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._triton import cdiv, next_power_of_2
from ._triton import state as triton_state

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon: Any = None
    gl: Any = SimpleNamespace(constexpr=int)

log = logging.getLogger(__name__)
HOPPER = (9, 0)
ROWS = 64
STAGES = 2
# A list of more sources is read as it stands: numbers and counts of sources are packed four bits each into an int32.
MOST_MERGED = 7
_refused: list[str] = []


def state(device: torch.device | None = None) -> tuple[str, str]:
    """``triton`` or ``pytorch``, and why, on a CUDA device or the current one."""
    chosen, why = triton_state(device)
    if chosen != "triton":
        return chosen, why
    if torch.cuda.get_device_capability(device) != HOPPER:
        return "pytorch", "not a Hopper chip"
    if gluon is None:
        return "pytorch", f"{why} has no Gluon for Hopper"
    if _refused:
        return "pytorch", f"{why} does not compile the kernel for Hopper: {_refused[0]}"
    return "triton", f"{why}, Gluon"


def refuse(reason: Exception) -> None:
    """Leaves this kernel out from here on: Gluon may change from one Triton to the next."""
    _refused.append(str(reason).strip().splitlines()[-1] if str(reason).strip() else type(reason).__name__)
    log.warning("cross-frame attention: %s; the kernel of other chips is used", state()[1])


def takes(d: int, device: torch.device | None = None) -> bool:
    """Whether the chip is a Hopper, and the head size one whose rows TMA can address."""
    return d % 8 == 0 and state(device)[0] == "triton"


def _config(d: int) -> dict[str, int]:
    """Warpgroups, keys of a block, width in shared memory, and registers, by head size; measured on an H200.

    A width beyond a power of two is taken in two parts: A and B of the products over channels, B of the sums.
    """
    if 32 < d <= 48:
        return {"CONSUMERS": 3, "KEYS": 128, "WIDTH": 64, "REGISTERS": 160, "PART_A": 32, "PART_B": 16, "SUM_B": 0}
    if d <= 64:
        width = max(16, next_power_of_2(d))
        return {"CONSUMERS": 3, "KEYS": 128, "WIDTH": width, "REGISTERS": 160, "PART_A": width, "PART_B": 0, "SUM_B": 0}
    if d <= 128:
        rest = 16 if d <= 80 else 32 if d <= 96 else 0
        part = 64 if rest else 128
        return {"CONSUMERS": 2, "KEYS": 128, "WIDTH": 128, "REGISTERS": 240, "PART_A": part, "PART_B": rest, "SUM_B": 0}
    rest = 32 if d <= 160 else 64 if d <= 192 else 0
    part = 128 if rest else 256
    return {"CONSUMERS": 2, "KEYS": 64, "WIDTH": 256, "REGISTERS": 240, "PART_A": part, "PART_B": rest, "SUM_B": rest}


def block_sizes(d: int) -> tuple[int, int]:
    """Queries and keys of a block, by head size."""
    return _config(d)["CONSUMERS"] * ROWS, _config(d)["KEYS"]


def _jit(function: Any = None, *, any_value: tuple[str, ...] = ()) -> Any:
    if function is None:
        return functools.partial(_jit, any_value=any_value)
    return gluon.jit(function, do_not_specialize=list(any_value)) if gluon else function


@_jit
def _reading(
    table, blocks, count, style_tokens, SOURCES: gl.constexpr, KEYS: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr
):  # fmt: skip
    """Where each frame of a list first stands and how often, four bits each; where the style's blocks begin, and all end.

    Each warp finds it by itself, while it has nothing else to do.
    """
    found, order, often = SOURCES, 0, 0
    if MERGED:
        row = (gl.load(table),)
        for s in gl.static_range(1, SOURCES):
            row += (gl.load(table + s),)
        found = 0
        for s in gl.static_range(SOURCES):
            new, many = 1, 0
            for r in gl.static_range(SOURCES):
                same = (row[r] == row[s]).to(gl.int32)
                many += same
                if r < s:
                    new *= 1 - same
            order += new * s << 4 * found
            often += new * many << 4 * found
            found += new
    style_from = found * blocks
    if SPARSE:
        style_from = count
    return order, often, style_from, style_from + (style_tokens + KEYS - 1) // KEYS


@_jit
def _place(
    i, kept, order, blocks, inverse, style_from, SOURCES: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr
):
    """Source and block within it of the i-th block that is read; the style's come last."""
    entry = i
    if SPARSE:
        if i < style_from:
            entry = gl.load(kept + i)
    # A division by what is the same throughout: exact while entry * blocks is below 2^30.
    s = ((entry.to(gl.int64) * inverse) >> 30).to(gl.int32)
    j = entry - s * blocks
    if MERGED:
        # Bounded, since the style's blocks may reach beyond what an int32 holds.
        s = (order >> 4 * gl.minimum(s, SOURCES - 1)) & 15
    if i >= style_from:
        s = SOURCES
        j = i - style_from
    return s, j


@_jit
def _produce(
    shared, q, k, v, style_keys, style_values, SOURCES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr,
    AFFINE: gl.constexpr,
):  # fmt: skip
    """Fetches the queries once (AdaIN makes its own), and keys and values as soon as a stage of shared memory is free."""
    buffers, barriers, reading, _, place, extents = shared
    queries, keys, values = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    table, kept, _, _ = reading
    b, t, h, first = place
    blocks, inverse, count, tokens, style_tokens, _ = extents
    if not AFFINE:
        for c in gl.static_range(CONSUMERS):
            # A warpgroup without queries waits for none.
            if first + c * ROWS < tokens:
                mbarrier.expect(q_full.index(c), ROWS * WIDTH * 2)
                tma.async_copy_global_to_shared(q, [b, t, h, first + c * ROWS, 0], q_full.index(c), queries.index(c))
    order, _, style_from, total_blocks = _reading(table, blocks, count, style_tokens, SOURCES, KEYS, SPARSE, MERGED)
    for i in range(0, total_blocks):
        stage, phase = i % STAGES, (i // STAGES) & 1
        # What says where to read is on its way before the stage is free.
        s, j = _place(i, kept, order, blocks, inverse, style_from, SOURCES, SPARSE, MERGED)
        source = gl.load(table + gl.minimum(s, SOURCES - 1)).to(gl.int32)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), KEYS * WIDTH * 2)
        if s < SOURCES:
            tma.async_copy_global_to_shared(k, [b, source, h, j * KEYS, 0], k_full.index(stage), keys.index(stage))
        else:
            tma.async_copy_global_to_shared(style_keys, [b, 0, h, j * KEYS, 0], k_full.index(stage), keys.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), KEYS * WIDTH * 2)
        if s < SOURCES:
            tma.async_copy_global_to_shared(v, [b, source, h, j * KEYS, 0], v_full.index(stage), values.index(stage))
        else:
            tma.async_copy_global_to_shared(
                style_values, [b, 0, h, j * KEYS, 0], v_full.index(stage), values.index(stage)
            )


@_jit
def _logits(
    query, keys, k_full, i, KEYS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr, PART_A: gl.constexpr, PART_B: gl.constexpr,
):  # fmt: skip
    """Issues the product of the queries with the i-th block of keys."""
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
    key = keys.index(i % STAGES).reshape((KEYS, WIDTH))
    zero = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    if PART_B == 0:
        return warpgroup_mma(query, key.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        part = warpgroup_mma(
            query.slice(0, PART_A, 1), key.slice(0, PART_A, 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        return warpgroup_mma(
            query.slice(PART_A, PART_B, 1), key.slice(PART_A, PART_B, 1).permute((1, 0)), part, is_async=True
        )


@_jit
def _queries_for(
    source, query, affine, table, row, tokens, scale, SOURCES: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Puts the queries that a source's keys are met by into shared memory; gives a bias a row.

    ``q . (a (k - m) + c) = (a q) . k + q . c - (a q) . m``: what is done to the keys is done to the queries once a source.
    The bias is of the queries as rounded, here and for the style's keys: what rounding does to them all falls out.
    """
    place, q_n, q_affine, k_affine, k_frame = affine
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row += gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = channel < D
    # Loads that others wait for come first. The style's keys are as they are.
    moves = inside & (source < SOURCES)
    k_affine += gl.load(table + gl.minimum(source, SOURCES - 1)) * k_frame
    x = gl.load(
        place + row[:, None] * q_n + channel[None, :], mask=(row[:, None] < tokens) & inside[None, :], other=0.0
    )
    q_scale = gl.load(q_affine + channel, mask=inside, other=0.0)
    q_centre = gl.load(q_affine + D + channel, mask=inside, other=0.0)
    q_shift = gl.load(q_affine + 2 * D + channel, mask=inside, other=0.0)
    k_scale = gl.load(k_affine + channel, mask=moves, other=1.0)
    k_centre = gl.load(k_affine + D + channel, mask=moves, other=0.0)
    k_shift = gl.load(k_affine + 2 * D + channel, mask=moves, other=0.0)
    x = ((x.to(gl.float32) - q_centre[None, :]) * q_scale[None, :] + q_shift[None, :]).to(query.dtype).to(gl.float32)
    scaled = (x * k_scale[None, :]).to(query.dtype)
    query.store(scaled)
    bias = gl.sum(x * k_shift[None, :] - scaled.to(gl.float32) * k_centre[None, :], 1) * scale
    fence_async_shared()
    return gl.convert_layout(bias, ROW)


@_jit
def _weigh(share, value, sums_a, sums_b, SUM_A: gl.constexpr, SUM_B: gl.constexpr):
    """Issues the product of the weights with a block of values."""
    if SUM_B == 0:
        return warpgroup_mma(share, value, sums_a, is_async=True), sums_b
    else:
        sums_a = warpgroup_mma(share, value.slice(0, SUM_A, 1), sums_a, is_async=True)
        return sums_a, warpgroup_mma(share, value.slice(SUM_A, SUM_B, 1), sums_b, is_async=True)


@_jit
def _finished(sums_a, sums_b, SUM_B: gl.constexpr):
    if SUM_B == 0:
        return warpgroup_mma_wait(0, [sums_a]), sums_b
    else:
        return warpgroup_mma_wait(0, [sums_a, sums_b])


@_jit
def _softmax(
    logits, most, bias, i, kept, order, biases, blocks, inverse, style_from, tokens, style_tokens, scale,
    SOURCES: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr, WEIGHTED: gl.constexpr,
    SPARSE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """Weights of a block, and the greatest logit so far; ``bias`` is by row."""
    if MASKED or WEIGHTED:
        s, j = _place(i, kept, order, blocks, inverse, style_from, SOURCES, SPARSE, MERGED)
        if WEIGHTED:
            bias += gl.load(biases + s)
        if MASKED:
            valid = gl.where(s < SOURCES, tokens, style_tokens) - j * KEYS
            # Only the last block of a source pays for the mask.
            if valid < KEYS:
                inside = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT)) < valid
                logits = gl.where(inside[None, :], logits, float("-inf"))
    new = gl.maximum(most, gl.max(logits, 1) * scale + bias)
    return gl.exp2(logits * scale - (new - bias)[:, None]), new


@_jit
def _store(
    out, out_b, out_t, out_h, out_n, b, t, h, first, tokens, sums, total, OFFSET: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    sums = sums * (1.0 / gl.convert_layout(total, gl.SliceLayout(1, LAYOUT)))[:, None]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    channel = OFFSET + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    place = out + b.to(gl.int64) * out_b + t.to(gl.int64) * out_t + h * out_h + row[:, None] * out_n + channel[None, :]
    gl.store(place, sums.to(out.dtype.element_ty), mask=(row[:, None] < tokens) & (channel[None, :] < D))


@_jit
def _consume(
    shared,
    INDEX: gl.constexpr, SOURCES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, PART_A: gl.constexpr, PART_B: gl.constexpr, SUM_B: gl.constexpr,
    MASKED: gl.constexpr, WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr, AFFINE: gl.constexpr,
    SUMMED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 queries over all blocks."""
    _, barriers, reading, _, place, extents = shared
    table, _, _, _ = reading
    _, _, _, first = place
    blocks, _, count, tokens, style_tokens, _ = extents
    order, often, style_from, total_blocks = _reading(table, blocks, count, style_tokens, SOURCES, KEYS, SPARSE, MERGED)
    if first + INDEX * ROWS >= tokens:
        _pass_by(barriers, total_blocks, STAGES)
    elif style_from < SOURCES * blocks if MERGED else False:
        # Rows without repeats keep the plain loop: to ask at each block whether the source ends takes time.
        _compute(
            shared, order, often, style_from, total_blocks, INDEX, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B,
            SUM_B, MASKED, WEIGHTED, SPARSE, True, AFFINE, SUMMED,
        )  # fmt: skip
    else:
        _compute(
            shared, order, often, style_from, total_blocks, INDEX, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B,
            SUM_B, MASKED, WEIGHTED, SPARSE, False, AFFINE, SUMMED,
        )  # fmt: skip


@_jit
def _pass_by(barriers, total_blocks, STAGES: gl.constexpr):
    """A warpgroup without queries lets every block go, and the others have the tensor cores to themselves."""
    _, k_full, k_empty, v_full, v_empty = barriers
    for i in range(0, total_blocks):
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)


@_jit
def _compute(
    shared, order, often, style_from, total_blocks,
    INDEX: gl.constexpr, SOURCES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, PART_A: gl.constexpr, PART_B: gl.constexpr, SUM_B: gl.constexpr,
    MASKED: gl.constexpr, WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr, AFFINE: gl.constexpr,
    SUMMED: gl.constexpr,
):  # fmt: skip
    buffers, barriers, reading, writing, place, extents = shared
    queries, keys, values = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    table, kept, biases, affine = reading
    out, out_b, out_t, out_h, out_n, logsums = writing
    b, t, h, first = place
    blocks, inverse, _, tokens, style_tokens, scale = extents
    SUM_A: gl.constexpr = PART_A if SUM_B else WIDTH
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    LAYOUT_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_A, 16])
    LAYOUT_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_B if SUM_B else 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_A, 2)
    query = queries.index(INDEX).reshape((ROWS, WIDTH))
    most = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    sums_a = gl.zeros([ROWS, SUM_A], gl.float32, LAYOUT_A)
    sums_b = gl.zeros([ROWS, SUM_B if SUM_B else 16], gl.float32, LAYOUT_B)
    bias = gl.zeros([ROWS], gl.float32, ROW)
    source = 0
    if AFFINE:
        source, _ = _place(0, kept, order, blocks, inverse, style_from, SOURCES, SPARSE, MERGED)
        bias = _queries_for(
            source, query, affine, table, first + INDEX * ROWS, tokens, scale, SOURCES, D, ROWS, WIDTH, ROW
        )  # fmt: skip
    else:
        mbarrier.wait(q_full.index(INDEX), 0)
    token = _logits(query, keys, k_full, 0, KEYS, WIDTH, STAGES, ROWS, LOGITS, PART_A, PART_B)
    logits = warpgroup_mma_wait(0, [token])
    mbarrier.arrive(k_empty.index(0), count=1)
    share, most = _softmax(
        logits, most, bias, 0, kept, order, biases, blocks, inverse, style_from, tokens, style_tokens, scale, SOURCES, KEYS,
        LOGITS, MASKED, WEIGHTED, SPARSE, MERGED,
    )  # fmt: skip
    total = gl.sum(share, 1)
    operand = gl.convert_layout(share.to(out.dtype.element_ty), OPERAND)
    # `total` and the sums are kept divided by how often the current source is listed, 2^unit; `most` takes up the
    # difference when the source changes. The style counts once.
    unit, until = 0.0, total_blocks
    if MERGED:
        unit, until = gl.log2((often & 15).to(gl.float32)), blocks
    for i in range(1, total_blocks):
        if MERGED:
            if i == until:
                often >>= 4
                now = gl.where(i < style_from, gl.log2((often & 15).to(gl.float32)), 0.0)
                most += unit - now
                unit = now
                until = gl.where(i < style_from, until + blocks, total_blocks)
        if AFFINE:
            s, _ = _place(i, kept, order, blocks, inverse, style_from, SOURCES, SPARSE, MERGED)
            if s != source:
                source = s
                bias = _queries_for(
                    source, query, affine, table, first + INDEX * ROWS, tokens, scale, SOURCES, D, ROWS, WIDTH, ROW
                )  # fmt: skip
        token = _logits(query, keys, k_full, i, KEYS, WIDTH, STAGES, ROWS, LOGITS, PART_A, PART_B)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        sums_a, sums_b = _weigh(operand, values.index(before).reshape((KEYS, WIDTH)), sums_a, sums_b, SUM_A, SUM_B)
        logits = warpgroup_mma_wait(2 if SUM_B else 1, [token])
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        share, new = _softmax(
            logits, most, bias, i, kept, order, biases, blocks, inverse, style_from, tokens, style_tokens, scale, SOURCES,
            KEYS, LOGITS, MASKED, WEIGHTED, SPARSE, MERGED,
        )  # fmt: skip
        fade = gl.exp2(most - new)
        total = total * fade + gl.sum(share, 1)
        most = new
        sums_a, sums_b = _finished(sums_a, sums_b, SUM_B)
        mbarrier.arrive(v_empty.index(before), count=1)
        sums_a = sums_a * gl.convert_layout(fade, gl.SliceLayout(1, LAYOUT_A))[:, None]
        if SUM_B:
            sums_b = sums_b * gl.convert_layout(fade, gl.SliceLayout(1, LAYOUT_B))[:, None]
        operand = gl.convert_layout(share.to(out.dtype.element_ty), OPERAND)
    last = (total_blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((total_blocks - 1) // STAGES) & 1)
    sums_a, sums_b = _weigh(operand, values.index(last).reshape((KEYS, WIDTH)), sums_a, sums_b, SUM_A, SUM_B)
    sums_a, sums_b = _finished(sums_a, sums_b, SUM_B)
    first += INDEX * ROWS
    if SUMMED:
        row = first + gl.arange(0, ROWS, ROW)
        gl.store(logsums + row, most + unit + gl.log2(total), mask=row < tokens)
    _store(out, out_b, out_t, out_h, out_n, b, t, h, first, tokens, sums_a, total, 0, D, ROWS, SUM_A, LAYOUT_A)
    if SUM_B:
        _store(out, out_b, out_t, out_h, out_n, b, t, h, first, tokens, sums_b, total, SUM_A, D, ROWS, SUM_B, LAYOUT_B)


@_jit(any_value=("heads", "frames", "k_frames", "tokens", "style_tokens", "count"))
def _attend(
    q, k, v, style_keys, style_values, table, biases, kept, q_place, q_affine, k_affine, logsums, out,
    q_b, q_t, q_h, q_n, out_b, out_t, out_h, out_n, heads, frames, k_frames, tokens, style_tokens, count, scale,
    SOURCES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PART_A: gl.constexpr, PART_B: gl.constexpr,
    SUM_B: gl.constexpr, MASKED: gl.constexpr, WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, MERGED: gl.constexpr,
    AFFINE: gl.constexpr, SUMMED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    first = gl.program_id(0) * CONSUMERS * ROWS
    h, bt = gl.program_id(1) % heads, gl.program_id(1) // heads
    t, b = bt % frames, bt // frames
    blocks = (tokens + KEYS - 1) // KEYS
    inverse = ((1 << 30) - 1 + blocks) // blocks
    if SPARSE:
        kept += (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)).to(gl.int64) * count
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, 1, ROWS, WIDTH], q.layout)
    keys = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, 1, KEYS, WIDTH], k.layout)
    values = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, 1, KEYS, WIDTH], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    fence_async_shared()
    batch = b.to(gl.int64)
    logsums += (batch * frames + t) * heads * tokens + h * tokens
    affine = (
        q_place + batch * q_b + t.to(gl.int64) * q_t + h * q_h,
        q_n,
        q_affine + ((batch * frames + t) * heads + h) * 3 * D,
        k_affine + (batch * k_frames * heads + h) * 3 * D,
        heads * 3 * D,
    )
    shared = (
        (queries, keys, values),
        (q_full, k_full, k_empty, v_full, v_empty),
        (table + t * SOURCES, kept, biases, affine),
        (out, out_b, out_t, out_h, out_n, logsums),
        (b, t, h, first),
        (blocks, inverse, count, tokens, style_tokens, scale),
    )
    # Constants stay constants only in a tuple written in place.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (shared, 0, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B, SUM_B, MASKED, WEIGHTED, SPARSE, MERGED,
                        AFFINE, SUMMED)),
            (_consume, (shared, 1, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B, SUM_B, MASKED, WEIGHTED, SPARSE, MERGED,
                        AFFINE, SUMMED)),
            (_produce, (shared, q, k, v, style_keys, style_values, SOURCES, CONSUMERS, ROWS, KEYS, WIDTH, STAGES, SPARSE, MERGED,
                        AFFINE)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (shared, 0, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B, SUM_B, MASKED, WEIGHTED, SPARSE, MERGED,
                        AFFINE, SUMMED)),
            (_consume, (shared, 1, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B, SUM_B, MASKED, WEIGHTED, SPARSE, MERGED,
                        AFFINE, SUMMED)),
            (_consume, (shared, 2, SOURCES, ROWS, KEYS, WIDTH, D, STAGES, PART_A, PART_B, SUM_B, MASKED, WEIGHTED, SPARSE, MERGED,
                        AFFINE, SUMMED)),
            (_produce, (shared, q, k, v, style_keys, style_values, SOURCES, CONSUMERS, ROWS, KEYS, WIDTH, STAGES, SPARSE, MERGED,
                        AFFINE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def _addressable(x: Tensor) -> Tensor:
    """A tensor as TMA takes it: channels side by side, other steps of 16 bytes and above 0."""
    steps = [s * x.element_size() for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and all(s > 0 and s % 16 == 0 for s in steps) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _shared_layout(width: int) -> Any:
    return NVMMASharedLayout(min(128, 2 * width), 16, 5)


def _descriptor(x: Tensor, rows: int, width: int) -> Any:
    x = _addressable(x)
    # The step of a dimension of one is never taken, but TMA checks it.
    steps = [s if size > 1 else 8 for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, 1, rows, width], _shared_layout(width))


def launch(
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
    """The kernel into ``out`` and ``logsums``; ``scale`` and ``biases`` are to base 2."""
    b, t, heads, n, d = q.shape
    k_frames, config = k.shape[1], _config(d)
    keys, width = config["KEYS"], config["WIDTH"]
    k, v = (_descriptor(x, keys, width) for x in (k, v))
    style = (k, v) if style_k is None else [_descriptor(x[:, None], keys, width) for x in (style_k, style_v)]
    tokens = 0 if style_k is None else style_k.shape[2]
    queries, _ = block_sizes(d)
    q_affine, k_affine = (sources, sources) if affines is None else affines
    # AdaIN leaves no registers to count how often a frame is listed.
    merged = biases is None and kept is None and affines is None and 1 < sources.shape[1] <= MOST_MERGED
    # Where it lies is read under AdaIN only.
    q_place = q if affines is None or q.stride(-1) == 1 else q.contiguous()
    _attend[(cdiv(n, queries), b * t * heads)](
        _descriptor(q, ROWS, width), k, v, *style, sources, sources if biases is None else biases,
        sources if kept is None else kept.contiguous(), q_place, q_affine, k_affine, sources if logsums is None else logsums,
        out, *q_place.stride()[:4], *out.stride()[:4], heads, t, k_frames, n, tokens, 0 if kept is None else kept.shape[-1],
        scale, SOURCES=sources.shape[1], D=d, ROWS=ROWS, STAGES=STAGES, MASKED=bool(n % keys or tokens % keys),
        WEIGHTED=biases is not None, SPARSE=kept is not None, MERGED=merged, AFFINE=affines is not None,
        SUMMED=logsums is not None, num_warps=4, **config,
    )  # fmt: skip
