"""Clips made on the spot, whose every frame carries its own number, and the bundled model."""

from __future__ import annotations

import itertools
import os
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Before Triton is first imported: its kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parents[1]
# `python -m pytest` puts the root first, where `kernels` would stand before Hugging Face's.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
EXAMPLES = ROOT / "examples"
BITS = 8


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "comfyui" in item.keywords and not os.environ.get("COMFYUI_PATH"):
            item.add_marker(pytest.mark.skip(reason="COMFYUI_PATH is not set"))


def numbered(index: int, width: int, height: int, background: tuple[int, int, int] = (90, 120, 150)) -> np.ndarray:
    """A picture ``[H, W, 3]`` uint8 with ``index`` as black and white blocks along its middle."""
    picture = np.empty((height, width, 3), np.uint8)
    picture[:] = background
    edges = np.linspace(0, width, BITS + 1).round().astype(int)
    for bit in range(BITS):
        picture[height // 4 : 3 * height // 4, edges[bit] : edges[bit + 1]] = 235 if index >> bit & 1 else 20
    return picture


def read_number(image: torch.Tensor) -> int:
    """The number in a frame ``[3, H, W]`` of 0..1."""
    _, height, width = image.shape
    band = image[:, 3 * height // 8 : 5 * height // 8].mean((0, 1))
    edges = np.linspace(0, width, BITS + 1)
    blocks = [band[int(a + (b - a) / 4) : int(b - (b - a) / 4)].mean() for a, b in itertools.pairwise(edges)]
    return sum(1 << i for i, value in enumerate(blocks) if value > 0.5)


def make_video(
    path: Path,
    count: int = 12,
    *,
    size: tuple[int, int] = (128, 64),
    rate: Fraction = Fraction(24),
    times: list[Fraction] | None = None,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    rotation: int = 0,
    audio: str | None = None,
    audio_seconds: float | None = None,
    picture=numbered,
    tags: dict | None = None,
    options: dict | None = None,
) -> Path:
    """Writes a numbered video with PyAV alone, so that reader and writer are judged by something else."""
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pixel_format
        base = 1 / rate if times is None else Fraction(1, 90000)
        stream.codec_context.time_base = stream.time_base = base
        for name, value in (tags or {}).items():
            setattr(stream.codec_context, name, value)
        if rotation:
            stream.set_display_rotation(rotation)
        sound = container.add_stream("aac", rate=48000, layout=audio) if audio else None
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(picture(i, *size), format="rgb24").reformat(format=pixel_format)
            frame.pts = i if times is None else round(times[i] / base)
            frame.time_base = base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound:
            seconds = audio_seconds if audio_seconds is not None else float(count / rate)
            channels = sound.codec_context.channels
            # A rising tone: it is like itself at one place only.
            n = np.arange(int(seconds * 48000))
            samples = (0.2 * np.sin(0.05 * n + 1e-6 * n**2)).astype(np.float32)
            for begin in range(0, len(samples), 1024):
                piece = np.ascontiguousarray(np.tile(samples[begin : begin + 1024], (channels, 1)))
                frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=audio)
                frame.rate, frame.pts, frame.time_base = 48000, begin, Fraction(1, 48000)
                container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return path


def make_pictures(count: int, size: tuple[int, int], seed: int = 0):
    """A picture function for :func:`make_video`: coloured texture that slides by half a pixel a frame."""
    width, height = size
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 7, generator=generator)
    field = torch.nn.functional.interpolate(coarse, (height, width + count), mode="bicubic")[0].clamp(0, 1)

    def picture(index: int, width: int, height: int) -> np.ndarray:
        view = field[:, :height, index // 2 : index // 2 + width]
        return np.ascontiguousarray(view.mul(255).byte().movedim(0, -1).numpy())

    return picture


@pytest.fixture(scope="session")
def backbone():
    from comfyui_veostyle.veo_core.backbones import load_backbone

    return load_backbone(None, torch.device("cpu"))


@pytest.fixture(scope="session")
def engine(backbone):
    from comfyui_veostyle.veo_core.engine import Stylizer
    from comfyui_veostyle.veo_core.motion.flow import load_flow

    return Stylizer(backbone, load_flow(torch.device("cpu")))


@pytest.fixture(scope="session")
def style():
    from comfyui_veostyle.veo_core.style.encoder import load_style

    return load_style([EXAMPLES / "great_wave.jpg"])


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A running ComfyUI."""
    from .comfy_server import Server

    made = Server(Path(os.environ["COMFYUI_PATH"]), tmp_path_factory.mktemp("comfyui"))
    yield made
    made.close()
