"""The memory plan: chunk sizes and peaks, decided before a run from the clip, the model and the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import psutil
import torch

from ..backbones.base import Backbone
from ..cuda_graphs import captures
from ..errors import BudgetError
from ..motion.flow import STRIDE, FlowNet
from ..motion.fusion import MOTION_CHANNELS, estimate_motion, fuse
from ..options import StylizeOptions
from ..sampling.timeline import CONTEXT, GROUP
from .trace import TracedMemory, trace_memory

MIB = 1 << 20
CHUNKS = (8, 4, 2, 1)
# Pixels that fill a chip, or a processor's cache: more frames at once take memory and give no time. By benchmarks/speed.py.
FILLS = {"cuda": 1 << 21, "cpu": 1 << 17}
RESERVE = 0.15
Policy = Literal["fast", "lean"]
POLICIES: tuple[Policy, ...] = ("fast", "lean")
# What the libraries keep for themselves, measured by benchmarks/memory.py: cuBLAS on a Hopper chip; on the host, code that
# is imported on first use, encoders and scratch.
CUDA_FIXED, HOST_FIXED = 32 * MIB, 150 * MIB


@dataclass(frozen=True)
class MemoryPlan:
    """How a run uses memory.

    Attributes:
        device: where the model runs.
        budget: bytes that the run may take there. reserve: bytes beyond the budget that are left alone: 15 % of what is
            free, or nothing where a person named the budget.
        weights: bytes of all networks, and of what the libraries keep for themselves.
        encode_chunk, decode_chunk: frames encoded and decoded at once. They do not change the result.
        stages: bytes beyond the weights at the peak of each stage. cache: those of them that a stage keeps from one step
            to the next: latents and motion of the window, what windows hand on, keys and values of style pictures.
        host: bytes of host memory beyond what the process held before, on a device of its own; 0 on the CPU, where the
            stages are host memory.
        disk: bytes that each frame takes in the run's folder while it lasts.
        graphs: whether calls are captured as CUDA graphs, which keep their memory between calls.
    """

    device: torch.device
    budget: int
    weights: int
    encode_chunk: int
    decode_chunk: int
    stages: dict[str, int]
    host: int
    disk: int
    cache: dict[str, int] = field(default_factory=dict)
    reserve: int = 0
    graphs: bool = False

    @property
    def peak(self) -> int:
        """Predicted peak on the device, bytes."""
        return self.weights + max(self.stages.values())

    def describe(self) -> str:
        """The plan in a few lines for a person."""
        lines = [
            f"{self.device.type}: peak {_mib(self.peak)} of a budget of {_mib(self.budget)}",
            f"  weights {_mib(self.weights)}",
        ]
        lines += [
            f"  {stage} {_mib(size)}" + (f", of which {_mib(kept)} are kept" if (kept := self.cache.get(stage)) else "")
            for stage, size in self.stages.items()
        ]
        if self.reserve:
            lines.append(f"  reserve {_mib(self.reserve)} beside the budget")
        by = ", by CUDA graphs" if self.graphs else ""
        lines.append(f"  encodes {self.encode_chunk} and decodes {self.decode_chunk} frames at once{by}")
        lines.append(f"  disk {self.disk / MIB:.1f} MiB a frame while it runs")
        if self.host:
            lines.append(f"  host memory {_mib(self.host)}")
        return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


def padded_size(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Width and height rounded up to what a model can take."""
    return tuple(side + -side % multiple for side in size)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return int(free)


def make_plan(
    peaks: StagePeaks,
    size: tuple[int, int],
    budget: int | None = None,
    policy: Policy = "fast",
    free: int | None = None,
) -> MemoryPlan:
    """Chooses chunks that fit.

    Args:
        peaks: of a model at the frames' padded size.
        size: width and height of the frames.
        budget: bytes on the model's device, its weights included; None takes what is free, less a reserve of 15 %.
        policy: ``fast`` takes chunks that fill the chip, or the largest that fit, ``lean`` the least memory.
        free: bytes that count as free on the device; None asks the device, and adds the weights that are there already.

    Raises:
        BudgetError: names the smallest budget that works.
    """
    backbone, flow, options = peaks.backbone, peaks.flow, peaks.options
    device = backbone.device
    weights = backbone.weight_bytes + sum(p.nbytes for p in flow.parameters())
    weights += CUDA_FIXED if device.type == "cuda" else HOST_FIXED
    reserve = 0
    if budget is None:
        free = free_memory(device) + (weights if device.type != "cpu" else 0) if free is None else free
        reserve = int(free * RESERVE)
        budget = free - reserve
    enough = FILLS["cpu" if device.type == "cpu" else "cuda"] / (size[0] * size[1])
    most = 4 if device.type == "cpu" else CHUNKS[0]
    chunks = [1] if policy == "lean" else [c for c in CHUNKS if c == 1 or c <= min(most, 2 * enough)]
    encodes, decodes = list(dict.fromkeys(min(c, options.window) for c in chunks)), chunks
    if backbone.time_factor > 1:
        encodes, decodes = [options.window], [GROUP * backbone.time_factor]
    encode = next((c for c in encodes if weights + peaks.peak("encode", c) <= budget), None)
    decode = next((c for c in decodes if weights + peaks.peak("decode", c) <= budget), None)
    # A preview decodes one frame beside what the window keeps.
    denoise = max(peaks.peak("denoise"), peaks.resident + peaks.peak("decode", 1))
    if encode is None or decode is None or weights + denoise > budget:
        least = weights + max(peaks.peak("encode", encodes[-1]), peaks.peak("decode", decodes[-1]), denoise)
        raise BudgetError(
            f"memory budget = {_mib(budget)} is too small for {size[0]}x{size[1]} frames in windows of {options.window}; "
            f"the smallest that works is {_mib(-(-least // MIB) * MIB)}, {math.ceil(least / 1e7) / 100:.2f} GB. "
            "Give that much, or make the frames or the window smaller."
        )
    counts = {"encode": encode, "denoise": 1, "decode": decode}
    stages = {stage: peaks.peak(stage, count) for stage, count in counts.items()} | {"denoise": denoise}
    # What is captured keeps the most that its calls take; a scene's last window, and a preview, are launched beside it.
    pool = max(stages["encode"], peaks.peak("denoise")) - peaks.resident
    captured = stages | {"encode": peaks.resident + pool, "denoise": denoise + pool}
    graphs = policy == "fast" and backbone.captured and captures(device) and weights + captured["denoise"] <= budget
    stages = captured if graphs else stages
    cache = {stage: peaks.cached(stage, count) for stage, count in counts.items()}
    frame = 4 * 3 * size[0] * size[1]
    host = HOST_FIXED + frame * (3 * max(encode, decode) + 6) + 2 * options.window * peaks.disk
    host = 0 if device.type == "cpu" else host
    return MemoryPlan(device, budget, weights, encode, decode, stages, host, peaks.disk, cache, reserve, graphs)


class StagePeaks:
    """Peaks of the stages for one model and frame size, each traced on fake tensors.

    ``jobs`` gives the computations themselves, so that a benchmark can run them for real.

    Args:
        padded: width and height of the frames as the model takes them.
        traced: keeps what was traced, for others of the same model, size and options.
    """

    def __init__(
        self,
        backbone: Backbone,
        flow: FlowNet,
        padded: tuple[int, int],
        options: StylizeOptions,
        traced: dict[tuple[str, int], TracedMemory] | None = None,
    ):
        self.backbone, self.flow, self.options = backbone, flow, options
        self.window = self._latents(options.window) - (CONTEXT if backbone.time_factor > 1 else 0)
        self.width, self.height = padded
        self.latent = (backbone.channels, self.height // backbone.factor, self.width // backbone.factor)
        self._traced = {} if traced is None else traced

    def jobs(self, count: int) -> dict[str, Callable[[], object]]:
        """The computation of each stage with ``count`` frames at once; they make their own inputs."""
        return {
            "encode": partial(self._encode, count),
            "denoise": self._denoise,
            "decode": partial(self._decode, count),
        }

    def peak(self, stage: str, count: int = 1) -> int:
        """Bytes beyond the weights at a stage's peak."""
        return self._memory(stage, count).peak + (0 if stage == "decode" else self.resident)

    def cached(self, stage: str, count: int = 1) -> int:
        """Bytes of that peak which a stage keeps from one step to the next."""
        return self._memory(stage, count).cached + (0 if stage == "decode" else self.resident)

    def _memory(self, stage: str, count: int) -> TracedMemory:
        key = (stage, 0 if stage == "denoise" else count)
        if key not in self._traced:
            self._traced[key] = trace_memory(self.jobs(count)[stage])
        return self._traced[key]

    @property
    def disk(self) -> int:
        """Bytes of one frame's latents and motion in the store."""
        c, h, w = self.latent
        return 4 * (c * h * w + MOTION_CHANNELS * self.height * self.width // STRIDE**2)

    def _latents(self, count: int) -> int:
        """Latent frames at most that so many frames take, those before them that a causal autoencoder needs included."""
        factor = self.backbone.time_factor
        return count if factor == 1 else CONTEXT + 1 + -(-(count - 1) // factor)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.backbone.device)

    @property
    def resident(self) -> int:
        """What stays while the others are made: latents and motion of a window, and what windows hand on."""
        c, h, w = self.latent
        return (self.window + 1) * (self.disk + 4 * 2 * c * h * w) + self.handed

    @cached_property
    def handed(self) -> int:
        """What the evaluations of the window before left and those of this one leave.

        That is the latents predicted for the frames that windows share, and ST-Norm's moments.
        """
        c, h, w = self.latent
        shared = -(-self.options.overlap // self.backbone.time_factor) * 4 * c * h * w
        return 2 * self.backbone.evaluations(self.options) * (shared + self._memory("denoise", 1).handed)

    def _encode(self, count: int) -> object:
        factor = self.backbone.time_factor
        before = 1 if factor == 1 else (CONTEXT - 1) * factor + 1
        frames = self._empty(count + before, 3, self.height, self.width)
        motion = estimate_motion(self.flow, frames[before - 1 :])
        return motion, self.backbone.encode(frames if factor > 1 else frames[1:])

    def _denoise(self) -> object:
        frames = self.window + 1
        content, motion = (self._empty(frames, c, *self.latent[1:]) for c in (self.latent[0], MOTION_CHANNELS))
        return content, motion, self.backbone.rehearse(self._empty(frames, *self.latent), self.options)

    def _decode(self, count: int) -> object:
        last = self._empty(1, 3, self.height, self.width)
        decoded = self.backbone.decode(self._empty(self._latents(count), *self.latent))[-count:]
        motion = self._empty(count, MOTION_CHANNELS, self.height // STRIDE, self.width // STRIDE)
        shown, fused = fuse(decoded, motion, last)
        return shown.clamp(0, 1), fused
