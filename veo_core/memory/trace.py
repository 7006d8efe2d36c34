"""Peak memory of a computation found without doing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LiveBytes(TorchDispatchMode):
    """Sums the bytes of tensor storages that are alive, and remembers the most there were."""

    def __init__(self, block: int, workspaces: bool):
        super().__init__()
        self.block, self.workspaces, self.live, self.peak = block, workspaces, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        if self.workspaces and func is torch.ops.aten.convolution.default:
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
    """Bytes that cuDNN takes beside an NCHW convolution's tensors.

    It works channels-last: it copies the input, and at stride 1 the output. Measured on an H200 by
    benchmarks/memory.py: encode, denoise and decode need 1.37, 1.20 and 1.54 times their tensors, at every size and
    number of frames; these copies give 1.37, 1.20 and 1.54.
    """
    copied = args[0].nbytes
    return copied + out.nbytes if set(args[3]) == {1} else copied


def traced_peak(compute: Callable[[], object], block: int = 512, workspaces: bool = False) -> int:
    """Most bytes that the tensors made by ``compute`` occupy at once.

    It runs on fake tensors: shapes flow, no arithmetic is done and no device memory is taken. Tensors that exist
    already, such as weights, are not counted.

    Args:
        compute: makes its own inputs.
        block: granularity of the allocator in bytes; 512 is that of PyTorch's CUDA allocator.
        workspaces: count what cuDNN takes for its convolutions too.
    """
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        live = _LiveBytes(block, workspaces)
        with live:
            kept = compute()
        del kept
    return live.peak
