"""Several low-rank adapters beside a linear layer in one kernel, their strengths read on the device.

``y + sum_s strength_s (x A_s) B_s`` (Hu et al. 2022) as one narrow product, y and x read once. Strengths lie in a tensor, so
that adapters are switched, weighed and left out without a copy and without a launch of another shape: a captured CUDA graph
follows them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import INTERPRETED, cdiv, is_traced, jit, next_power_of_2, on_its_device, runs_on, tl

# Beyond it the narrow product would not fit into the shared memory of a consumer's card.
MOST_RANK = 128


def lora_slots(y: Tensor, x: Tensor, down: Tensor, up: Tensor, strengths: Tensor) -> Tensor:
    """Adds adapters to a layer's output; they lie side by side along the rank.

    Args:
        y: the layer's output ``[..., out]``. x: its input ``[..., in]``.
        down: ``[ranks, in]``. up: ``[out, ranks]``.
        strengths: float32 ``[ranks]``, of the adapter that each rank belongs to, its scale included; 0 takes it out.

    Returns:
        ``[..., out]``, a new tensor.
    """
    if _fits(y, x, down, up):
        run = torch.ops.veostyle.lora_slots if is_traced(y) else launch
        return run(y, x, down, up, strengths)
    return y + F.linear((F.linear(x, down) * strengths).to(x.dtype), up)


def _fits(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> bool:
    half = x.dtype in (torch.float16, torch.bfloat16) and x.dtype == y.dtype == down.dtype
    return half and len(down) <= MOST_RANK and runs_on(y, x, down, up)


@jit
def _add_slots(
    y, x, down, up, strengths, out, rows, inputs, outputs, x_step, y_step,
    RANKS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row, r = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    there = r < RANKS
    inner = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(0, inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        inside = (row[:, None] < rows) & (i[None, :] < inputs)
        part = tl.load(x + row[:, None].to(tl.int64) * x_step + i[None, :], mask=inside, other=0.0)
        inside = there[:, None] & (i[None, :] < inputs)
        factor = tl.load(down + r[:, None] * inputs + i[None, :], mask=inside, other=0.0)
        inner = tl.dot(part, factor.T, inner)
    strength = tl.load(strengths + r, mask=there, other=0.0)
    narrow = (inner * strength[None, :]).to(out.dtype.element_ty)
    begin = tl.program_id(1) * SPAN
    for first in range(begin, min(begin + SPAN, outputs), OUTPUTS):
        column = first + tl.arange(0, OUTPUTS)
        inside = (column[:, None] < outputs) & there[None, :]
        factor = tl.load(up + column[:, None] * RANKS + r[None, :], mask=inside, other=0.0)
        inside = (row[:, None] < rows) & (column[None, :] < outputs)
        value = tl.load(y + row[:, None].to(tl.int64) * y_step + column[None, :], mask=inside, other=0.0)
        value = tl.dot(narrow, factor.T, value.to(tl.float32))
        place = out + row[:, None].to(tl.int64) * outputs + column[None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@on_its_device
def launch(y: Tensor, x: Tensor, down: Tensor, up: Tensor, strengths: Tensor) -> Tensor:
    """:func:`lora_slots` by the kernel."""
    flat_x, flat_y = (z.flatten(0, -2) for z in (x, y))
    flat_x, flat_y = (z if z.stride(-1) == 1 else z.contiguous() for z in (flat_x, flat_y))
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, inputs, outputs = len(flat_x), x.shape[-1], y.shape[-1]
    ranks = len(down)
    small = INTERPRETED
    blocks = {"ROWS": 16 if small else 128, "INPUTS": 16 if small else 64, "OUTPUTS": 16 if small else 64, "SPAN": 512}
    _add_slots[(cdiv(rows, blocks["ROWS"]), cdiv(outputs, blocks["SPAN"]))](
        flat_y, flat_x, down.contiguous(), up.contiguous(), strengths, out, rows, inputs, outputs, flat_x.stride(0),
        flat_y.stride(0), RANKS=ranks, PADDED=max(16, next_power_of_2(ranks)), **blocks,
    )  # fmt: skip
    return out


@torch.library.custom_op("veostyle::lora_slots", mutates_args=())
def _operator(y: Tensor, x: Tensor, down: Tensor, up: Tensor, strengths: Tensor) -> Tensor:
    return launch(y, x, down, up, strengths)


@_operator.register_fake
def _(y: Tensor, x: Tensor, down: Tensor, up: Tensor, strengths: Tensor) -> Tensor:
    return y.new_empty(y.shape)
