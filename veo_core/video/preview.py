"""A small copy of a clip that any browser plays, with the clip's own trim, rate and size."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from ..progress import Monitor, ignore
from ..weights_file import file_state
from .codecs import OutputFormat
from .reader import Clip
from .save import save_clip

SIDE, FRAMES, SECONDS = 480, 300, 60
_BROWSERS = {".mp4": ("h264", "av1"), ".webm": ("vp9", "av1"), ".gif": ("gif",), ".webp": ("webp",)}


def plays_in_browser(clip: Clip) -> bool:
    """Whether browsers play the clip's file as it is."""
    return clip.info.codec in _BROWSERS.get(clip.path.suffix.lower(), ()) and clip.info.bits == 8


def beginning(clip: Clip, frames: int) -> Clip:
    """At most so many frames of the first minute of a clip."""
    duration = min(clip.duration or SECONDS, Fraction(SECONDS))
    return replace(clip, duration=duration, max_frames=min(clip.max_frames or frames, frames))


def preview(clip: Clip, folder: Path, monitor: Monitor = ignore) -> Path:
    """Writes the beginning, 300 frames or a minute, at no more than 480 pixels a side, once for each file and settings.

    Args:
        folder: made when missing; the file's name tells what is in it.
        monitor: told before each frame; may raise to interrupt.

    Raises:
        InputError: nothing could be read.
    """
    scale = min(1.0, SIDE / max(clip.size))
    small = clip.scaled(*(max(16, 2 * round(side * scale / 2)) for side in clip.size))
    small = beginning(small, FRAMES)
    told = repr((file_state(clip.path), [v for k, v in vars(small).items() if k != "info"]))
    path = folder / f"veostyle_preview_{hashlib.sha256(told.encode()).hexdigest()[:16]}.mp4"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    return save_clip(small, path, OutputFormat("h264", crf=26), monitor=monitor)
