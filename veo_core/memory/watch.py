"""Memory measured while a run goes on, by stage, to be held against the plan."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import zip_longest

import psutil
import torch

from ..cuda_graphs import held
from ..progress import Monitor, Progress
from .plan import MIB, MemoryPlan, Policy

INTERVAL = 0.1
MOST_SAMPLES = 2000


@dataclass(frozen=True)
class MemoryTrace:
    """What was measured of one part of a run.

    Attributes:
        samples: ``(seconds, stage, bytes)`` in order, at most 2,000; bytes are those on the model's device that the run
            and its networks take, of host memory where that is the device.
        peaks: most bytes by stage; on a GPU the allocator's own count, elsewhere the largest sample.
    """

    samples: tuple[tuple[float, str, int], ...]
    peaks: dict[str, int]


@dataclass(frozen=True)
class RunMemory:
    """How much memory a run may take, what was planned, and what it took. The nodes' VEO_MEMORY.

    Attributes:
        budget: bytes on the model's device; None for what is free, less a reserve.
        policy: how chunks are chosen.
        plan: None before one was made.
        traces: of what has run, in order.
    """

    budget: int | None = None
    policy: Policy = "fast"
    plan: MemoryPlan | None = None
    traces: tuple[MemoryTrace, ...] = ()

    @property
    def peaks(self) -> dict[str, int]:
        """Most bytes measured by stage."""
        merged: dict[str, int] = {}
        for trace in self.traces:
            for stage, size in trace.peaks.items():
                merged[stage] = max(size, merged.get(stage, 0))
        return merged

    def describe(self) -> str:
        """Planned against measured, one line a stage."""
        lines = []
        for stage, measured in self.peaks.items():
            if stage not in self.plan.stages:
                lines.append(f"{stage}: {measured / MIB:,.0f} MiB measured")
                continue
            planned = self.plan.weights + self.plan.stages[stage]
            lines.append(
                f"{stage}: {planned / MIB:,.0f} MiB planned, {measured / MIB:,.0f} MiB measured"
                f" ({100 * (measured / planned - 1):+.1f} %)"
            )
        return "\n".join(lines)


class MemoryWatch:
    """Samples memory every 100 ms while it is open, beside the run and in constant space. A monitor that wraps another.

    Each call of the monitor says which stage the run is in. A run's own memory is what has come since the watch was
    opened, beside the weights, which were there.

    Args:
        plan: of the run. monitor: told everything that this one is told.
    """

    def __init__(self, plan: MemoryPlan, monitor: Monitor):
        self.plan, self.monitor = plan, monitor
        self.stage = ""
        self.samples: list[tuple[float, str, int]] = []
        self.peaks: dict[str, int] = {}
        self._apart = 0.0
        self._lock, self._done = threading.Lock(), threading.Event()

    def __enter__(self) -> MemoryWatch:
        self._begun = time.monotonic()
        self._before = self._used() - self.plan.weights
        if self.plan.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.plan.device)
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.stage:
            self._sample()
            self.stage = progress.stage
        self.monitor(progress)

    @property
    def trace(self) -> MemoryTrace:
        """What was measured so far."""
        return MemoryTrace(tuple(self.samples), dict(self.peaks))

    def _run(self) -> None:
        while not self._done.wait(INTERVAL):
            self._sample()

    def _used(self) -> int:
        if self.plan.device.type == "cuda":
            return torch.cuda.memory_allocated(self.plan.device) + held(self.plan.device)
        return psutil.Process().memory_info().rss

    def _sample(self) -> None:
        with self._lock:
            used = self._used() - self._before
            peak = used
            if self.plan.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.plan.device) + held(self.plan.device) - self._before
                torch.cuda.reset_peak_memory_stats(self.plan.device)
            if self.stage:
                self.peaks[self.stage] = max(peak, self.peaks.get(self.stage, 0))
                self._keep((time.monotonic() - self._begun, self.stage, peak))

    def _keep(self, sample: tuple[float, str, int]) -> None:
        """Adds a sample, in one with the last where they are closer than what is kept apart."""
        if self.samples and sample[1] == self.samples[-1][1] and sample[0] - self.samples[-1][0] < self._apart:
            self.samples[-1] = (self.samples[-1][0], sample[1], max(sample[2], self.samples[-1][2]))
            return
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            # Of each two the larger: coarser in time, no peak lost.
            pairs = zip_longest(self.samples[::2], self.samples[1::2], fillvalue=sample)
            self.samples = [max(pair, key=lambda s: s[2]) for pair in pairs]
            self._apart = 2 * self._apart or INTERVAL
