"""Linear layers with weights in FP8 (E4M3), by PyTorch's scaled product where the chip has it."""

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPE = torch.float8_e4m3fn
GREATEST = torch.finfo(DTYPE).max
OLDEST = (8, 9)
TILE = 16
# Of a row: far below the format's own, so that a product in half precision does not overflow before it is scaled back.
ROW_GREATEST = 8.0


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor as FP8 and the float32 scale ``[]`` that undoes it; all of it zero gives scale 1."""
    weight = weight.detach().float()
    scale = weight.abs().amax() / GREATEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).clamp(-GREATEST, GREATEST).to(DTYPE), scale


def widened(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor that :func:`quantise` was given, as far as it kept it."""
    return (weight.float() * scale).to(dtype)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` with W in FP8; each row of x is brought to FP8 by a scale of its own where the chip multiplies FP8.

    Elsewhere the weight is widened for the product. A row's result depends on no other row, so not on what else is in a batch.

    Args:
        x: ``[..., in]``. weight: ``[out, in]`` and scale: ``[]``, of :func:`quantise`.

    Returns:
        ``[..., out]`` in x's dtype.
    """
    if not multiplies(x) or any(size % TILE for size in weight.shape):
        return F.linear(x, widened(weight, scale, x.dtype), bias)
    rows = x.flatten(0, -2)
    row_scale = rows.abs().amax(-1, keepdim=True).float() / ROW_GREATEST
    row_scale = torch.where(row_scale > 0, row_scale, 1.0)
    narrow = (rows / row_scale).clamp(-ROW_GREATEST, ROW_GREATEST).to(DTYPE)
    one = torch.ones((), device=x.device)
    out = torch._scaled_mm(narrow, weight.t(), scale_a=one, scale_b=scale, out_dtype=x.dtype) * row_scale
    out = out if bias is None else out + bias
    return out.to(x.dtype).unflatten(0, x.shape[:-1])


def multiplies(x: Tensor) -> bool:
    """Whether there are FP8 products for a tensor: half precision, on a chip of compute capability 8.9 or above."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return half and x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) >= OLDEST
