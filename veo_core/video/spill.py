"""What is in memory put into a file, so that a clip can be read from it like any other."""

from __future__ import annotations

import hashlib
import os
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ..errors import InputError
from .codecs import OutputFormat
from .writer import VideoWriter

LEVELS = 1023
# Matroska would round times to milliseconds; NUT keeps them.
SPILLED = ".nut"


def spill_frames(images: Tensor, rate: Fraction, folder: Path) -> Path:
    """Writes frames, 10 bits a colour, to a file named after what is in it; the same frames are written once.

    Args:
        images: ``[n, H, W, 3 or 4]`` in 0..1, any device; alpha is dropped.
        rate: frames per second.

    Raises:
        InputError: no frames, another shape, values that are not finite, or a rate out of range.
    """
    if images.ndim != 4 or images.shape[-1] not in (3, 4) or not all(images.shape):
        raise InputError(f"images have shape {tuple(images.shape)}; give a batch of colour pictures [n, H, W, 3]")
    if not 0 < rate <= 240:
        raise InputError(f"rate = {float(rate):g} is out of range; give up to 240 frames a second")
    hashed = hashlib.sha256(f"{rate}:{tuple(images.shape)}".encode())
    for image in images:
        if not image.isfinite().all():
            raise InputError("images hold values that are not finite; make them again")
        hashed.update(_levels(image).numpy().tobytes())
    height, width = images.shape[1:3]
    path = folder / f"veostyle_{hashed.hexdigest()[:16]}{SPILLED}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with VideoWriter(path, (width, height), rate, output=OutputFormat("ffv1", deep=True)) as writer:
            for i, image in enumerate(images):
                writer.write(_levels(image).float().div(LEVELS).movedim(-1, 0)[None], [i / rate])
        _timeless(path)
    return path


def _levels(image: Tensor) -> Tensor:
    return image[..., :3].detach().float().clamp(0, 1).mul(LEVELS).round().short().cpu()


def spill_file(stream: BinaryIO, folder: Path) -> Path:
    """Writes a media file that is in memory to one named after what is in it."""
    stream.seek(0)
    contents = stream.read()
    path = folder / f"veostyle_{hashlib.sha256(contents).hexdigest()[:16]}.media"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(contents)
        part.replace(path)
        _timeless(path)
    return path


def _timeless(path: Path) -> None:
    """The name says what is in it: written again, it is the same file to whoever goes by its time."""
    os.utime(path, (0, 0))
