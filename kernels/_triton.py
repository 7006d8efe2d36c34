"""Triton where it is installed, and whether its kernels run here."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

try:
    import triton
    import triton.language as tl
    from triton.errors import TritonError
except ImportError:
    # Only Linux wheels of PyTorch bring Triton; the kernels' bodies are then never run.
    triton: Any = None
    tl: Any = SimpleNamespace(constexpr=int)
    TritonError: Any = RuntimeError

log = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = (8, 0)


def jit(function: Any = None, *, any_value: Sequence[str] = ()) -> Any:
    """``triton.jit``, or the function itself where Triton is not.

    Args:
        any_value: integers for whose values no version of its own is compiled, such as a number of frames.
    """
    if function is None:
        return functools.partial(jit, any_value=any_value)
    return triton.jit(function, do_not_specialize=list(any_value)) if triton else function


def state(device: torch.device | None = None) -> tuple[str, str]:
    """``triton`` or ``pytorch`` on a CUDA device or the current one, and why."""
    if device is not None and device.index is not None:
        return _state(device.index)
    if not torch.cuda.is_available():
        return "pytorch", "no CUDA device"
    return _state(torch.cuda.current_device())


@functools.cache
def _state(index: int) -> tuple[str, str]:
    if not triton:
        return "pytorch", "Triton is not installed, or too old"
    if torch.version.hip:
        return "pytorch", "the kernels were tried on NVIDIA's chips alone"
    if torch.cuda.get_device_capability(index) < OLDEST:
        return "pytorch", f"the chip is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return _tried(index)


def _tried(index: int) -> tuple[str, str]:
    """Whether a kernel of one line compiles and runs: Triton needs a C compiler, which may not be there."""
    try:
        # A plan may ask while it traces tensors without data; this one must have some.
        with _disable_current_modes(), torch.cuda.device(index):
            x = torch.zeros(1, device=f"cuda:{index}")
            _write_one[(1,)](x)
            if x.item() != 1:
                raise RuntimeError("a kernel wrote nothing")
    except Exception as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        log.warning("Triton %s does not run here, PyTorch's own kernels are used: %s", triton.__version__, reason[-1])
        return "pytorch", f"Triton {triton.__version__} does not run here: {reason[-1]}"
    return "triton", f"Triton {triton.__version__}"


@jit
def _write_one(x):
    tl.store(x, 1.0)


def runs_on(*tensors: Tensor | None) -> bool:
    """Whether kernels take these tensors: on CUDA, none empty, and without a gradient to be kept."""
    there = [x for x in tensors if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in there)
    if needs_grad or not all(x.is_cuda and x.numel() for x in there):
        return False
    return state(there[0].device)[0] == "triton"


def cdiv(x: int, y: int) -> int:
    """A division upwards; Triton's own is for its compiler, and takes 5 microseconds on the host."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The least power of two that is not below x > 0; Triton's own is as slow."""
    return 1 << (x - 1).bit_length()


def on_its_device(launch: Callable) -> Callable:
    """Triton launches on the current device; this makes it that of a function's first argument."""

    @functools.wraps(launch)
    def guarded(first: Any, *rest: Any, **named: Any) -> Any:
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return launch(first, *rest, **named)
        with torch.cuda.device(first.device):
            return launch(first, *rest, **named)

    return guarded


def are_aligned(*tensors: Tensor) -> bool:
    """Whether rows of half precision can be read 16 bytes at a time."""
    return all(x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:-1]) for x in tensors)


@jit
def at_head(head, step, ALIGNED: tl.constexpr):
    """Where a head begins; Triton knows steps of 16 by itself, not those of 8, as of heads of 40 channels."""
    place = head * step
    if ALIGNED:
        place = tl.multiple_of(place, 8)
    return place


def is_traced(x: Tensor) -> bool:
    """Whether a tensor stands for one without data, so that a registered operator must stand for the kernel."""
    return torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor)


def is_planned(x: Tensor) -> bool:
    """Whether a tensor has no data, and only the memory is wanted that a computation takes."""
    return isinstance(x, torch._subclasses.FakeTensor) and not torch.compiler.is_compiling()


@functools.cache
def notice_first_use(kernel: str) -> None:
    """Says once in a process that a kernel may have to be compiled, which takes seconds; Triton keeps it on disk."""
    log.info("%s: compiled for this chip on first use, kept by Triton", kernel)
