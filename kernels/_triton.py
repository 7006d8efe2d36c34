"""Triton where it is installed, and whether its kernels run here."""

import functools
import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    # Only Linux wheels of PyTorch bring Triton; the kernels' bodies are then never run.
    triton: Any = None
    tl: Any = SimpleNamespace(constexpr=int)

log = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = (8, 0)


def jit(function: Any) -> Any:
    """``triton.jit``, or the function itself where Triton is not."""
    return triton.jit(function) if triton else function


@functools.cache
def state() -> tuple[str, str]:
    """``triton`` or ``pytorch``, and why."""
    if not torch.cuda.is_available():
        return "pytorch", "no CUDA device"
    if not triton:
        return "pytorch", "Triton is not installed"
    if torch.cuda.get_device_capability() < OLDEST:
        return "pytorch", f"the chip is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return "triton", f"Triton {triton.__version__}"


def runs_on(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors: on CUDA, and without a gradient to be kept."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return all(x.is_cuda for x in tensors) and not needs_grad and state()[0] == "triton"


def is_traced(x: Tensor) -> bool:
    """Whether a tensor stands for one without data, so that a registered operator must stand for the kernel."""
    return torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor)


@functools.cache
def notice_first_use(kernel: str) -> None:
    """Says once in a process that a kernel may have to be compiled, which takes seconds; Triton keeps it on disk."""
    log.info("%s: compiled for this chip on first use, kept by Triton", kernel)
