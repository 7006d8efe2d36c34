"""Linear layers of a network in FP8: about half of half precision's bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ...kernels.fp8_linear import fp8_linear, quantise, widened

WEIGHT_DTYPES = ("fp8_e4m3fn",)
# What a network is told of time and size goes through a few narrow layers, and every error there reaches all pixels.
KEPT = ("time", "add_embedding", "text_projection")


class Fp8Linear(nn.Linear):
    """A linear layer whose weight is FP8 with one scale; under the same names.

    Attributes:
        compute_dtype: of the layer that it stands for.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.compute_dtype = layer.weight.dtype
        weight, scale = quantise(layer.weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", scale)

    def _apply(self, fn, recurse=True):
        """Moves between devices; a change of dtype is that of the computation alone."""
        weight, scale = self.weight.data, self.scale
        super()._apply(fn, recurse)
        device = fn(scale).device
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        self.weight.data, self.scale = weight.to(device), scale.to(device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.scale, self.bias)


class Fp8Attention(nn.Module):
    """Self-attention that stands for an ``nn.MultiheadAttention``, whose own keeps its projections out of reach.

    Args:
        attention: of queries, keys and values of one width.
    """

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        self.heads, self.batch_first = attention.num_heads, attention.batch_first
        width, biased = attention.embed_dim, attention.in_proj_bias is not None
        joint = nn.Linear(width, 3 * width, biased, device="meta")
        joint.weight, joint.bias = attention.in_proj_weight, attention.in_proj_bias
        self.in_proj, self.out_proj = Fp8Linear(joint), Fp8Linear(attention.out_proj)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """``query``, which is ``key`` and ``value`` too: ``[b, n, C]``, or ``[n, b, C]`` as the original has it."""
        x = query if self.batch_first else query.transpose(0, 1)
        q, k, v = rearrange(self.in_proj(x), "b n (p h d) -> p b h n d", p=3, h=self.heads)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask)
        out = self.out_proj(rearrange(out, "b h n d -> b n (h d)"))
        return (out if self.batch_first else out.transpose(0, 1)), None


def to_fp8(model: nn.Module) -> None:
    """Replaces the linear layers of a network in place, those of its time embedding left alone."""
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if any(k in f"{path}.{name}" for k in KEPT):
                continue
            # Other subclasses are read by their parents in ways of their own.
            if type(child) is nn.Linear:
                setattr(module, name, Fp8Linear(child))
            elif type(child) is nn.MultiheadAttention and child.in_proj_weight is not None:
                setattr(module, name, Fp8Attention(child))


def weight_of(layer: nn.Module) -> Tensor:
    """A layer's weight in the dtype that it computes in."""
    if isinstance(layer, Fp8Linear):
        return widened(layer.weight, layer.scale, layer.compute_dtype)
    return layer.weight


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """The dtype that a layer computes in."""
    return layer.compute_dtype if isinstance(layer, Fp8Linear) else layer.weight.dtype
