"""Calls of a network captured as CUDA graphs and replayed: small batches wait for launches, not for the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Latent pixels of a batch up to which launching takes longer than computing, on an H200 with SD 1.5's UNet.
LAUNCH_BOUND = 8 * 64 * 64
CAPTURE_AFTER = 2


def captures(device: torch.device) -> bool:
    """Whether calls on a device can be captured: on the current NVIDIA device, under PyTorch's own allocator.

    With cudaMallocAsync, which ComfyUI takes unless told otherwise, a capture that fails ends the process; a PyTorch whose
    generators cannot change their state could not undo one. A capture records the current device's work alone, and some
    packs put models on another. On AMD none has been tried.
    """
    if device.type != "cuda" or torch.version.hip or not hasattr(torch.Generator, "graphsafe_set_state"):
        return False
    return torch.cuda.get_allocator_backend() == "native" and device.index in (None, torch.cuda.current_device())


def fill(x: Tensor, count: int) -> Tensor:
    """``x [n, ...]`` with its last entry repeated up to ``count``, so that calls of one shape are enough."""
    return x if len(x) >= count else torch.cat([x, x[-1:].expand(count - len(x), *x.shape[1:])])


_all: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


def held(device: torch.device) -> int:
    """Bytes on a device that captured calls keep for themselves, which PyTorch counts as free between replays."""
    return sum(graphs.held for graphs in _all if graphs.device == device)


@contextmanager
def _process_kept(device: torch.device, pool: tuple[int, int]) -> Iterator[None]:
    """Undoes what PyTorch leaves in the process when a capture fails.

    The generator whose state was being captured draws nothing any more, so a capture is given a copy of it. The allocator
    goes on as if it were capturing: it keeps what is freed, even when memory runs out, and the pool besides.
    """
    generator = torch.cuda.default_generators[device.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    except BaseException:
        # Refused where the capture itself came to its end.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise
    finally:
        generator.graphsafe_set_state(state)


def _set_aside(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any


class CudaGraphs:
    """Graphs by key. A key stands for everything that a call reads besides its tensors' values.

    A call runs as it is the first two times, so that libraries have set themselves up; then it is captured, with
    inputs copied into buffers of its own. What the call reads besides its inputs (weights, an adapter's factors) must live
    as long as this object. All graphs share one pool of memory, freed with this object.

    Args:
        enabled: otherwise every call runs as it is.

    Attributes:
        held: bytes of the pool that PyTorch counts as free between replays. device: where.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled, self.held, self.device = enabled, 0, None
        self._calls: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """``function(*inputs)``, which must not synchronise; its result is overwritten by the next call of any key."""
        if not self.enabled:
            return function(*inputs)
        key = (key, tuple((x.shape, x.dtype, x.device) for x in inputs))
        captured = self._captured.get(key)
        if captured is None:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= CAPTURE_AFTER:
                return function(*inputs)
            captured = self._captured[key] = self._capture(function, inputs)
        for buffer, x in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(x)
        captured.graph.replay()
        return captured.output

    def _capture(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Captured:
        buffers = tuple(x.clone() for x in inputs)
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        # Another thread may decode previews or copy frames meanwhile. The stream's own block brings it back whatever the end
        # of a capture that failed does.
        with (
            _process_kept(buffers[0].device, pool),
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            before = _set_aside(buffers[0].device)
            output = function(*buffers)
        self._pool, self.device = pool, buffers[0].device
        self.held += _set_aside(self.device) - before
        _all.add(self)
        return _Captured(graph, buffers, output)
