"""Peak memory of a computation found without doing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LiveBytes(TorchDispatchMode):
    """Sums the bytes of tensor storages that are alive, and remembers the most there were."""

    def __init__(self, block: int):
        super().__init__()
        self.block, self.live, self.peak, self.cached, self.handed = block, 0, 0, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        if func is torch.ops.aten.convolution.default:
            self.peak = max(self.peak, self.live + _convolution_workspace(args, out))
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.block) * self.block
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def _convolution_workspace(args: tuple, out: torch.Tensor) -> int:
    """Bytes that a convolution takes beside its NCHW tensors.

    cuDNN works channels-last, oneDNN in blocks: they copy the input, and at stride 1 the output; what is channels-last
    already cuDNN takes as it is. Measured on an H200 by benchmarks/memory.py with veo-mini, NCHW: encode, denoise and
    decode need 1.37, 1.20 and 1.54 times their tensors, at every size and number of frames; these copies give 1.37, 1.20
    and 1.54. On the CPU they bring the plan within a tenth.
    """
    if out.is_cuda and args[0].is_contiguous(memory_format=torch.channels_last):
        return 0
    copied = args[0].nbytes
    return copied + out.nbytes if set(args[3]) == {1} else copied


_active: list[_LiveBytes] = []


def tracing(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a trace: it has a shape and no values."""
    return bool(_active) and isinstance(tensor, FakeTensor)


def declare_workspace(size: float) -> None:
    """Counts bytes that a computation outside PyTorch's sight is said to take at this point of a trace."""
    if _active:
        _active[-1].peak = max(_active[-1].peak, _active[-1].live + int(size))


def declare_cache(*tensors: torch.Tensor) -> None:
    """Says during a trace that these tensors are kept for later computations, and not only for the one at work."""
    if _active:
        _active[-1].cached += sum(t.nbytes for t in tensors)


def declare_handed(*tensors: torch.Tensor) -> None:
    """Says during a trace of one step that it leaves these to the window after."""
    if _active:
        _active[-1].handed += sum(t.nbytes for t in tensors)


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of a computation.

    Attributes:
        peak: what it occupies at most. cached: what of that it keeps for later computations.
        handed: what it leaves to the window after.
    """

    peak: int
    cached: int = 0
    handed: int = 0


def trace_memory(compute: Callable[[], object], block: int = 512) -> TracedMemory:
    """Most bytes that the tensors made by ``compute`` occupy at once.

    It runs on fake tensors: shapes flow, no arithmetic is done and no device memory is taken. Tensors that exist
    already, such as weights, are not counted; the copies that convolutions make of their tensors are.

    Args:
        compute: makes its own inputs.
        block: granularity of the allocator in bytes; 512 is that of PyTorch's CUDA allocator.
    """
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        live = _LiveBytes(block)
        _active.append(live)
        try:
            with live:
                kept = compute()
            del kept
        finally:
            _active.pop()
    return TracedMemory(live.peak, min(live.cached, live.peak), live.handed)
