"""What an adapter adds to one layer's output; the layer's weight is read where DoRA needs it, never written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.fp8 import weight_of


@dataclass(frozen=True)
class Adapter:
    """Low-rank factors for one layer.

    Attributes:
        kind: ``lora`` (Hu et al. 2022), ``loha`` (Hadamard product; FedPara, Hyeon-Woo et al. 2022) or ``lokr``
            (Kronecker product; Yeh et al. 2024).
        factors: ``down``, ``up`` and for Tucker-decomposed convolutions ``mid``; or ``w1``, ``w1_a``, ``w1_b``, ``t1``
            and the same with 2.
        scale: alpha over rank, or over its root where the file says rank-stabilised (Kalajdzievski 2023).
        magnitude: DoRA's (Liu et al. 2024, eq. 5), ``[out]``, or ``[1, in]`` where the norms are over outputs; None for
            plain adapters.
    """

    kind: str
    factors: dict[str, Tensor]
    scale: float
    magnitude: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, and inputs times the kernel's size."""
        f = self.factors
        if self.kind == "lora":
            kernel = f["mid"][0, 0].numel() if "mid" in f else 1
            return f["up"].shape[0], f["down"][0].numel() * kernel
        meta = {k: torch.empty(v.shape, device="meta") for k, v in f.items()}
        first, second = (_factor(meta, n) for n in ("1", "2"))
        if self.kind == "loha":
            return first.shape[0], first[0].numel()
        return first.shape[0] * second.shape[0], first[0].numel() * second[0].numel()

    @property
    def fits(self) -> bool:
        """Whether its factors can be multiplied, which their shapes tell."""
        try:
            return self.with_factors(lambda v: torch.empty(v.shape, device="meta")).delta() is not None
        except (RuntimeError, ValueError, IndexError):
            return False

    @property
    def is_plain(self) -> bool:
        """Whether it is a product of two factors and nothing else."""
        return self.kind == "lora" and self.magnitude is None and "mid" not in self.factors

    def with_factors(self, change) -> Adapter:
        """The same with every tensor changed by a function."""
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return replace(self, factors={k: change(v) for k, v in self.factors.items()}, magnitude=magnitude)

    def delta(self) -> Tensor:
        """The change of weight that the factors stand for, scaled: ``[out, in, ...]``."""
        f = self.factors
        if self.kind == "lora":
            if "mid" in f:
                return self.scale * torch.einsum(
                    "o r, r s h w, s i -> o i h w", f["up"].flatten(1), f["mid"], f["down"].flatten(1)
                )
            return self.scale * (f["up"].flatten(1) @ f["down"].flatten(1)).reshape(-1, *f["down"].shape[1:])
        first, second = (_factor(f, n) for n in ("1", "2"))
        if self.kind == "loha":
            return self.scale * first * second
        if second.ndim == 4 and first.ndim == 2:
            first = first[:, :, None, None]
        return self.scale * torch.kron(first, second.contiguous())

    def added(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What goes beside the layer's output at strength 1.

        Args:
            layer: Linear or Conv2d. x: its input.
        """
        if self.magnitude is None and self.kind == "lora":
            return self.scale * self._narrow(layer, x)
        if self.magnitude is None:
            return _apply(layer, x, self.delta().reshape(layer.weight.shape))
        weight = weight_of(layer).to(x.dtype)
        merged = weight + self.delta().reshape(weight.shape)
        if self.magnitude.ndim == 1:
            norm = merged.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.ndim - 1))
        else:
            norm = merged.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *[1] * (weight.ndim - 2))
        return _apply(layer, x, merged * (self.magnitude.reshape(norm.shape) / norm) - weight)

    def _narrow(self, layer: nn.Module, x: Tensor) -> Tensor:
        f = self.factors
        if isinstance(layer, nn.Linear):
            return F.linear(F.linear(x, f["down"].flatten(1)), f["up"].flatten(1))
        kernel = f["mid"] if "mid" in f else f["down"]
        if "mid" in f:
            x = F.conv2d(x, _as_kernel(f["down"]))
        x = F.conv2d(x, _as_kernel(kernel), None, layer.stride, layer.padding, layer.dilation)
        return F.conv2d(x, _as_kernel(f["up"]))


def _as_kernel(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x[:, :, None, None]


def _apply(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _factor(f: dict[str, Tensor], n: str) -> Tensor:
    """A factor given whole, as a product of two, or Tucker-decomposed over a kernel."""
    if f"w{n}" in f:
        return f[f"w{n}"]
    a, b, core = f[f"w{n}_a"], f[f"w{n}_b"], f.get(f"t{n}")
    if core is None:
        return (a @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])
    return torch.einsum("i j k l, i p, j r -> p r k l", core, a, b)
