"""Where long work is: one event, told to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Seconds before a speed is worth telling.
SETTLED = 0.5


@dataclass(frozen=True)
class Progress:
    """Where a piece of work is.

    Attributes:
        stage: of a run ``survey``, ``encode``, ``denoise`` or ``decode``, where encoding and denoising take turns, window
            by window; of other work ``read``, ``save``, ``compare`` or ``sheet``.
        done, total: frames that are through that stage; total is 0 while it is not known.
        preview: makes the newest frame ``[3, H, W]`` in 0..1, or None.
        resumed: frames of the stage that an earlier run had done.
    """

    stage: str
    done: int
    total: int = 0
    preview: Callable[[], Tensor] | None = None
    resumed: int = 0


# Told before each step, chunk or frame; what it raises ends the work there.
Monitor = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A monitor that does nothing."""


TITLES = {
    "survey": "looking for cuts",
    "denoise": "stylising",
    "decode": "writing",
    "read": "reading",
    "save": "saving",
    "compare": "comparing",
    "sheet": "drawing",
}


class Pace:
    """One line for people: what goes on, how far it is, how fast, and how long it will yet take.

    Encoding and denoising are one piece of work to whoever waits, so the line is that of the frames through both.
    """

    def __init__(self):
        self._begun: dict[str, tuple[float, int]] = {}
        self._through = 0

    def seen(self, progress: Progress) -> Progress:
        """The same event as it is to be shown: ``encode`` as the ``denoise`` that it is a part of."""
        if progress.stage == "denoise":
            self._through = progress.done
        if progress.stage != "encode":
            return progress
        return replace(progress, stage="denoise", done=max(self._through, progress.resumed))

    def speed(self, progress: Progress) -> float | None:
        """Frames per second of a shown event's stage since its first event; None while it cannot be told."""
        now = time.monotonic()
        begun, first = self._begun.setdefault(progress.stage, (now, progress.done))
        return (progress.done - first) / (now - begun) if progress.done > first and now - begun > SETTLED else None

    def line(self, progress: Progress) -> str:
        """Of a shown event."""
        done, total = progress.done, progress.total
        parts = [TITLES[progress.stage]]
        if done or total:
            parts[0] += f": frame {done}" + (f" of {total}" if total else "")
        if progress.resumed:
            parts.append(f"resumed at frame {progress.resumed}")
        if speed := self.speed(progress):
            parts.append(f"{speed:.1f} fps")
            if total > done:
                minutes, seconds = divmod(round((total - done) / speed), 60)
                parts.append(f"{minutes}:{seconds:02} left")
        return ", ".join(parts)
