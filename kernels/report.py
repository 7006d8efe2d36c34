"""What each kernel takes of this chip, beside PyTorch's own libraries at the same job."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from . import cross_frame_attention as attention
from . import cross_frame_attention_hopper as hopper
from . import fp8_linear, kv_int4, lora_slots, nearby_tokens, st_norm
from ._triton import state

REPEATS = 10


@dataclass(frozen=True)
class Launches:
    """What a job launches.

    Attributes:
        microseconds: on the GPU, all of its launches.
        registers, shared: of the launch that takes longest, a thread and bytes a block. kernel: its name.
        spills: of the compiled kernel, where known.
    """

    microseconds: float
    registers: int
    shared: int
    kernel: str
    spills: int | None = None

    def __str__(self) -> str:
        spills = "" if self.spills is None else f", {self.spills} spills"
        return f"{self.microseconds:.0f} us, {self.registers} registers{spills}, {self.shared:,} bytes shared"


@dataclass(frozen=True)
class KernelReport:
    """One kernel's state, and its figures and PyTorch's where it runs."""

    name: str
    state: str
    reason: str
    ours: Launches | None = None
    pytorch: Launches | None = None


def reports() -> list[KernelReport]:
    """All kernels; where they run, each is run at a job of SD 1.5's middle sizes."""
    states = [attention.state(), *[state()] * (len(NAMES) - 2), _fp8_state()]
    if state()[0] != "triton":
        return [KernelReport(name, *found) for name, found in zip(NAMES, states, strict=True)]
    out = []
    for name, found, (ours, theirs, compiled) in zip(NAMES, states, _jobs(), strict=True):
        try:
            out.append(KernelReport(name, *found, _launches(ours, compiled), _launches(theirs)))
        except Exception as e:
            # A report that names the fault is what this is for.
            out.append(KernelReport(name, "failed", f"{type(e).__name__}: {e}"))
    return out


def _fp8_state() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "pytorch", "no CUDA device"
    if fp8_linear.multiplies(torch.empty(0, device="cuda", dtype=torch.float16)):
        return "scaled_mm", "PyTorch's own product of the chip"
    return "pytorch", "the chip has no FP8 products; weights are widened"


NAMES = (
    "cross-frame attention",
    "nearby tokens",
    "group norm, ST-Norm",
    "4-bit keys and values",
    "adapter slots",
    "FP8 linear",
)
Job = tuple[Callable[[], Any], Callable[[], Any], Any]


def _jobs() -> list[Job]:
    def half(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    q, k, v = (half(1, 8, 1024, 8, 80).transpose(2, 3) for _ in range(3))
    this = torch.arange(8, device="cuda")
    table = torch.stack([torch.zeros_like(this), (this - 1).clamp(min=0), this], 1)
    kernel = hopper._attend if hopper.takes(80) else attention._attend
    around = torch.arange(1024, device="cuda")[:, None] + torch.arange(-4, 5, device="cuda")
    nearby = 1024 * this[:, None, None] + around.clamp(0, 1023)
    out, logsums = torch.empty_like(q), torch.zeros(q.shape[:-1], device="cuda")
    h, weight, bias = half(8, 320, 64, 64), half(320), half(320)
    packed = kv_int4.pack(half(8, 1024, 64), half(8, 1024, 64))
    on_cpu = kv_int4.PackedKV(*(x.cpu() for x in vars(packed).values()))
    wide = [x.cuda() for x in kv_int4.unpack(on_cpu)]
    x, y, down, up = half(8192, 640), half(8192, 640), half(32, 640), half(640, 32)
    strengths = torch.ones(32, device="cuda")
    layer, columns = half(2560, 640), half(8192, 640)
    narrow = fp8_linear.quantise(layer)
    return [
        (lambda: attention.cross_frame_attention(q, k, v, table), lambda: attention.reference(q, k, v, table), kernel),
        (
            lambda: nearby_tokens.add_nearby(out, logsums, q, k, v, nearby, None, 0.1),
            lambda: F.scaled_dot_product_attention(
                q[..., None, :], *(nearby_tokens.nearby_tokens(x, nearby) for x in (k, v))
            ),
            nearby_tokens._add,
        ),
        (
            lambda: st_norm.group_norm(h, 32, weight, bias, 1e-5, silu=True),
            lambda: F.silu(F.group_norm(h, 32, weight, bias, 1e-5)),
            st_norm._affine,
        ),
        # What reading them costs beside reading the same tokens at 16 bits.
        (lambda: kv_int4.unpack(packed), lambda: [w.clone() for w in wide], kv_int4._unpack),
        (
            lambda: lora_slots.lora_slots(y, x, down, up, strengths),
            lambda: y + F.linear(F.linear(x, down), up),
            lora_slots._add_slots,
        ),
        (lambda: fp8_linear.fp8_linear(columns, *narrow), lambda: F.linear(columns, layer), None),
    ]


def _launches(job: Callable[[], Any], compiled: Any = None) -> Launches | None:
    """A job's launches as the profiler saw them, or None where it may not look."""
    with torch.no_grad():
        job()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(REPEATS):
                job()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launched = [e for e in events if e.get("cat") == "kernel"]
    if not launched:
        return None
    longest = max(launched, key=lambda e: e["dur"])
    facts = longest["args"]
    return Launches(
        sum(e["dur"] for e in launched) / REPEATS,
        int(facts.get("registers per thread", 0)),
        int(facts.get("shared memory", 0)),
        longest["name"],
        _spills(compiled),
    )


def _spills(compiled: Any) -> int | None:
    """The most registers that a version of a Triton function spills, or None where Triton does not tell."""
    caches = getattr(compiled, "device_caches", {}).values()
    versions = [k for cache in caches for k in cache[0].values() if getattr(k, "n_spills", None) is not None]
    return max((k.n_spills for k in versions), default=None)
