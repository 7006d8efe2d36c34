"""Linear layers with weights in FP8 (E4M3), by PyTorch's scaled product where the chip has it."""

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPE = torch.float8_e4m3fn
GREATEST = torch.finfo(DTYPE).max
OLDEST = (8, 9)
TILE = 16


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
    """``x W^T + bias`` with W in FP8; x goes to FP8 as it is, beyond +-448 cut off, where the chip multiplies FP8.

    Elsewhere the weight is widened for the product. x has no scale, so that a row's result does not depend on what else is
    in a batch; what enters a transformer's linear layers is normalised, and far from either end of the format.

    Args:
        x: ``[..., in]``. weight: ``[out, in]`` and scale: ``[]``, of :func:`quantise`.

    Returns:
        ``[..., out]`` in x's dtype.
    """
    if not multiplies(x) or any(size % TILE for size in weight.shape):
        return F.linear(x, widened(weight, scale, x.dtype), bias)
    narrow = x.flatten(0, -2).clamp(-GREATEST, GREATEST).to(DTYPE)
    one = torch.ones((), device=x.device)
    out = torch._scaled_mm(narrow, weight.t(), scale_a=one, scale_b=scale, bias=bias, out_dtype=x.dtype)
    return out.unflatten(0, x.shape[:-1])


def multiplies(x: Tensor) -> bool:
    """Whether there are FP8 products for a tensor: half precision, on a chip of compute capability 8.9 or above."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return half and x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) >= OLDEST
