"""Calls of a network captured as CUDA graphs and replayed: small batches wait for launches, not for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Latent pixels of a batch up to which launching takes longer than computing, on an H200 with SD 1.5's UNet.
LAUNCH_BOUND = 8 * 64 * 64
CAPTURE_AFTER = 2


def captures(x: Tensor) -> bool:
    """Whether calls on a tensor can be captured: on CUDA, under PyTorch's own allocator.

    With cudaMallocAsync, which ComfyUI takes unless told otherwise, a capture that fails ends the process.
    """
    return x.is_cuda and torch.cuda.get_allocator_backend() == "native"


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any


class CudaGraphs:
    """Graphs by key. A key stands for everything that a call reads besides its tensors' values.

    A call runs as it is until it has been made twice, so that libraries have set themselves up; then it is captured, with
    inputs copied into buffers of its own. What the call reads besides its inputs (weights, an adapter's factors) must live
    as long as this object. All graphs share one pool of memory, freed with this object.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """``function(*inputs)``, which must not synchronise; its result is overwritten by the next call of any key."""
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
        graph = torch.cuda.CUDAGraph()
        # Another thread may decode previews or copy frames meanwhile. The outer block brings the stream back whatever the
        # end of a capture that failed does.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            output = function(*buffers)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, buffers, output)
