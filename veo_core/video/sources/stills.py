"""Frames of pictures: a folder of stills, a still or animated picture file."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence, features
from torch import Tensor

from ...errors import InputError
from ..color import ColorTags
from ..info import STILL_RATE, THUMBNAIL, Decoded, VideoInfo
from ..pictures import SUFFIXES, deep_pixels, is_deep_png, open_picture, pixels_of, unreadable
from ..scale import scale


def holds(path: Path) -> bool:
    """Whether a path is pictures, to be read by Pillow: a folder of stills, or a picture file."""
    if path.is_dir():
        return any(_is_still(p) for p in path.iterdir())
    suffix = path.suffix.lower()
    return suffix in SUFFIXES and (suffix != ".avif" or (features.check("avif") and not _is_avif_sequence(path)))


def _is_still(path: Path) -> bool:
    """By its name; what other systems hide beside pictures, such as ``._0.png``, is none."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _is_avif_sequence(path: Path) -> bool:
    """Whether FFmpeg reads it as a film, with exact times: Pillow rounds them to milliseconds."""
    with path.open("rb") as file:
        head = file.read(64)
    return head[4:8] == b"ftyp" and b"avis" in head[8 : struct.unpack(">I", head[:4])[0]]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]

    def natural(p: Path) -> list:
        return [[int(n) for n in re.findall("[0-9]+", p.stem)], p.name]

    return sorted(filter(_is_still, path.iterdir()), key=natural)


def probe(path: Path) -> VideoInfo:
    """What pictures say of themselves; the first is decoded, an animated one as far as its times need."""
    files = _files(path)
    with open_picture(files[0]) as picture:
        try:
            picture.load()
            upright = ImageOps.exif_transpose(picture)
            alpha = picture.has_transparency_data
            kind = (picture.format or "picture").lower()
            shown = _durations(files[0], picture) if path.is_file() else [1 / STILL_RATE] * len(files)
        except Exception as e:
            raise unreadable(str(files[0]), e) from e
    length = sum(shown, Fraction(0))
    bits = 16 if is_deep_png(files[0]) or upright.mode.startswith(("I", "F")) else 8
    return VideoInfo(*upright.size, len(shown) / length, length, kind, bits, alpha, ColorTags())


def _durations(file: Path, picture: Image.Image) -> list[Fraction]:
    """Seconds that each image of a file is on show."""
    if picture.format == "WEBP" and getattr(picture, "n_frames", 1) > 1:
        return _webp_durations(file.read_bytes())
    shown = []
    for still in ImageSequence.Iterator(picture):
        still.load()
        shown.append(_duration(still))
    return shown


def _webp_durations(data: bytes) -> list[Fraction]:
    """From the headers of an animated WebP's frames (its chunks ``ANMF``); nothing is decoded."""
    shown, place = [], 12
    while place + 8 <= len(data):
        kind, length = struct.unpack("<4sI", data[place : place + 8])
        if kind == b"ANMF":
            shown.append(_seconds(int.from_bytes(data[place + 20 : place + 23], "little")))
        place += 8 + length + length % 2
    return shown


def _duration(still: Image.Image) -> Fraction:
    return _seconds(still.info.get("duration"))


def _seconds(milliseconds: float | None) -> Fraction:
    return Fraction(milliseconds).limit_denominator(1_000_000) / 1000 if milliseconds else 1 / STILL_RATE


def decode(path: Path) -> Iterator[Decoded]:
    """A picture file by its own durations, 24 images a second where it has none; a folder at 24 files a second."""
    time = Fraction(0)
    size: tuple[int, int] | None = None
    for file in _files(path):
        with open_picture(file) as picture:
            deep = is_deep_png(file) and "icc_profile" not in picture.info
            images = ImageSequence.Iterator(picture)
            while (own := _next(file, images)) is not None:
                duration = _duration(own) if path.is_file() else 1 / STILL_RATE
                size = size or ImageOps.exif_transpose(own).size
                yield Decoded(time, duration, partial(_convert, file, own, deep, size), partial(_thumbnail, file, own))
                time += duration


def _next(file: Path, images: Iterator[Image.Image]) -> Image.Image | None:
    try:
        still = next(images, None)
        return None if still is None else still.copy()
    except Exception as e:
        raise unreadable(str(file), e) from e


def _convert(file: Path, still: Image.Image, deep: bool, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    image, alpha = deep_pixels(file) if deep else _pixels(file, still)
    return tuple(None if p is None else scale(torch.from_numpy(np.ascontiguousarray(p)), *size) for p in (image, alpha))


def _pixels(file: Path, still: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        return pixels_of(still)
    except InputError:
        raise
    except Exception as e:
        raise unreadable(str(file), e) from e


def _thumbnail(file: Path, still: Image.Image) -> Tensor:
    if still.mode.startswith(("I", "F")):
        small = torch.from_numpy(_pixels(file, still)[0])[None]
        return torch.nn.functional.interpolate(small, THUMBNAIL, mode="area")[0]
    small = still.convert("RGB").resize(THUMBNAIL[::-1], Image.Resampling.BOX)
    return torch.from_numpy(np.array(small)).movedim(-1, 0).float() / 255
