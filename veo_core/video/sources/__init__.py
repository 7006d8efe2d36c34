"""Where frames come from: files with streams, and pictures. Each has ``probe`` and ``decode``."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from ...errors import InputError
from ..info import Decoded, ReadReport, VideoInfo
from ..pictures import SUFFIXES
from . import film, stills

__all__ = ["decode", "probe"]


def probe(path: Path, stream: int | None = None) -> VideoInfo:
    """Reads a file's headers and its first frame.

    Args:
        stream: which of a file's video streams; None is the one that is flagged as default, or the first.

    Raises:
        InputError: says what is wrong with the file.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a video, an animated picture or a folder of stills")
    if stills.holds(path):
        return stills.probe(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder without pictures; give a folder of {', '.join(sorted(SUFFIXES))} files")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty (0 bytes); export or download it again")
    return film.probe(path, stream)


def decode(path: Path, stream: int, report: ReadReport, start: Fraction = Fraction(0)) -> Iterator[Decoded]:
    """Frames in order; those well before ``start`` (seconds) may be left out, the one on show then never is."""
    if stills.holds(path):
        return stills.decode(path)
    return film.decode(path, stream, report, start)
