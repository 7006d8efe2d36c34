"""Video in: a lazy clip that is read frame by frame, timed by presentation time stamps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..progress import Monitor, Progress, ignore
from .ahead import ahead
from .info import Decoded, ReadReport, VideoInfo
from .scale import scale
from .sources import decode, probe

MIN_SIDE, MAX_SIDE = 16, 16384
# Those that wait at a time.
THUMBNAILS = 32
# Containers round time stamps to a millisecond.
SAME_TIME = Fraction(1, 1000)
Fit = Literal["stretch", "crop", "pad"]


@dataclass
class Frame:
    """One frame of a clip.

    Attributes:
        index: place in the clip, from 0.
        time: seconds from the clip's first frame.
        image: float32 ``[3, H, W]`` in 0..1, BT.709 or as tagged, upright, at the clip's size.
        alpha: float32 ``[1, H, W]`` in 0..1, or None.
    """

    index: int
    time: Fraction
    image: Tensor
    alpha: Tensor | None = None


@dataclass(frozen=True)
class Clip:
    """A piece of a video, described and not held: reading it opens the file and closes it again.

    Attributes:
        path: video file, animated picture, or folder of stills (24 frames a second unless ``rate`` is set).
        start, duration: seconds of the source; None plays to the end.
        rate: frames per second to read at; a frame is then the one shown at that time. None keeps every source frame
            and its own time stamp.
        every_nth: keep one frame in so many, counted after ``rate``.
        max_frames: keep at most so many.
        width, height: size to read at; None follows the other with the aspect kept, both None keeps the source's.
        fit: what to do when both are given and the aspect differs.
        stream: which of the file's video streams.
    """

    path: Path
    info: VideoInfo = field(compare=False)
    start: Fraction = Fraction(0)
    duration: Fraction | None = None
    rate: Fraction | None = None
    every_nth: int = 1
    max_frames: int | None = None
    width: int | None = None
    height: int | None = None
    fit: Fit = "crop"
    stream: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the frames that are read."""
        w, h = self.info.width, self.info.height
        if self.width and self.height:
            return self.width, self.height
        if self.width:
            return self.width, max(1, round(Fraction(h * self.width, w)))
        if self.height:
            return max(1, round(Fraction(w * self.height, h))), self.height
        return w, h

    @property
    def nominal_rate(self) -> Fraction:
        """Frames per second of what is read, an average where the source's rate varies."""
        return (self.rate or self.info.rate) / self.every_nth

    def frames(
        self,
        first: int = 0,
        report: ReadReport | None = None,
        before_frame: Callable[[int], None] = lambda index: None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Frame]:
        """Frames from index ``first`` on, one at a time, their images on a device. ``before_frame`` is told each index,
        those passed over too.

        Raises:
            InputError: when the file has no frame in the asked span.
        """
        report, device = report if report is not None else ReadReport(), torch.device(device)

        def converting() -> Iterator[Callable[[], Callable[[], Frame]]]:
            origin: Fraction | None = None
            with closing(self._selected(report)) as selected:
                for index, (time, decoded) in enumerate(selected):
                    origin = time if origin is None else origin
                    before_frame(index)
                    if index >= first:
                        yield partial(self._converted, index, time - origin, decoded, device)
            if origin is None:
                raise InputError(self._nothing_read())

        return _called(ahead(converting()))

    def _converted(self, index: int, time: Fraction, decoded: Decoded, device: torch.device) -> Callable[[], Frame]:
        """What makes a frame where it is wanted, its work on the processor done."""
        if device.type != "cpu" and decoded.codes is not None:
            rgb = decoded.codes().staged(device)
            return lambda: Frame(index, time, self._resize(rgb()))
        image, alpha = decoded.convert()
        image, alpha = self._resize(image), None if alpha is None else self._resize(alpha)
        return lambda: Frame(index, time, image.to(device), alpha)

    def scaled(self, width: int, height: int) -> Clip:
        """The same clip at another size, cropped or padded as this one is."""
        fit = self.fit if self.width and self.height else "stretch"
        return replace(self, width=width, height=height, fit=fit)

    def picked(
        self, indices: Collection[int], before_frame: Callable[[int], None] = lambda index: None
    ) -> Iterator[Frame]:
        """The frames with these indices, in order; the others are not converted. Fewer where the clip is shorter.

        ``before_frame`` is told every index.
        """
        last = max(indices, default=-1)
        origin: Fraction | None = None
        with closing(self._selected(ReadReport())) as selected:
            for index, (time, decoded) in enumerate(selected):
                origin = time if origin is None else origin
                before_frame(index)
                if index in indices:
                    yield Frame(index, time - origin, self._resize(decoded.convert()[0]))
                if index >= last:
                    return

    def thumbnails(self, report: ReadReport | None = None) -> Iterator[tuple[Fraction, Fraction, Tensor]]:
        """Every frame as a quick 64x36 picture, for a look at the whole clip.

        Yields:
            Seconds from the first frame, seconds on show, float32 ``[3, 36, 64]`` in about 0..1, not turned upright.
        """
        report = report if report is not None else ReadReport()

        def shrinking() -> Iterator[Callable[[], tuple[Fraction, Fraction, Tensor]]]:
            origin: Fraction | None = None
            with closing(self._selected(report)) as selected:
                for time, decoded in selected:
                    origin = time if origin is None else origin
                    shown = self.every_nth / self.rate if self.rate else decoded.duration * self.every_nth
                    yield partial(_thumbnail_of, time - origin, shown, decoded)
            if origin is None:
                raise InputError(self._nothing_read())

        return ahead(shrinking(), THUMBNAILS)

    def _nothing_read(self) -> str:
        if self.start > 0:
            length = "unknown length" if self.info.duration is None else f"{float(self.info.duration):.3f} s long"
            return f"{self.path}: no frame at or after start = {float(self.start):g} s; the video is {length}. Lower start."
        return f"{self.path}: no frame could be decoded. The file is empty or damaged; play or re-encode it to check."

    def _selected(self, report: ReadReport) -> Iterator[tuple[Fraction, Decoded]]:
        end = None if self.duration is None else self.start + self.duration
        with closing(decode(self.path, self.stream, report, self.start)) as source:
            timed = _at_rate(source, self.rate, self.start, end) if self.rate else _between(source, self.start, end)
            stop = None if self.max_frames is None else self.max_frames * self.every_nth
            yield from islice(timed, 0, stop, self.every_nth)

    def _resize(self, image: Tensor) -> Tensor:
        width, height = self.size
        h, w = image.shape[-2:]
        if (w, h) == (width, height):
            return image
        if self.fit == "stretch" or not (self.width and self.height):
            return scale(image, width, height)
        pick = max if self.fit == "crop" else min
        factor = pick(Fraction(width, w), Fraction(height, h))
        inner_w, inner_h = max(1, round(w * factor)), max(1, round(h * factor))
        image = scale(image, inner_w, inner_h)
        left, top = (width - inner_w) // 2, (height - inner_h) // 2
        return F.pad(image, (left, width - inner_w - left, top, height - inner_h - top))


def _called(calls: Iterator[Callable[[], Frame]]) -> Iterator[Frame]:
    with closing(calls):
        for call in calls:
            yield call()


def _thumbnail_of(time: Fraction, shown: Fraction, decoded: Decoded) -> tuple[Fraction, Fraction, Tensor]:
    return time, shown, decoded.thumbnail()


def _between(source: Iterator[Decoded], start: Fraction, end: Fraction | None) -> Iterator[tuple[Fraction, Decoded]]:
    """Frames from ``start`` on; the one on show at ``start`` begins there."""
    on_show: Decoded | None = None
    for frame in source:
        if end is not None and frame.time >= end:
            break
        if frame.time < start - SAME_TIME:
            on_show = frame
            continue
        if on_show is not None and frame.time > start + SAME_TIME:
            yield start, on_show
        on_show = None
        yield frame.time, frame
    if on_show is not None and on_show.time + on_show.duration > start:
        yield start, on_show


def _at_rate(
    source: Iterator[Decoded], rate: Fraction, start: Fraction, end: Fraction | None
) -> Iterator[tuple[Fraction, Decoded]]:
    """The frame on show at ``start + k / rate`` for every k while the video lasts."""
    count = 0
    held: Decoded | None = None

    def due(until: Fraction) -> Iterator[tuple[Fraction, Decoded]]:
        nonlocal count
        while (time := start + count / rate) < until:
            if end is not None and time >= end:
                return
            if held is not None:
                yield time, held
            count += 1

    for frame in source:
        if held is not None or frame.time > start:
            held = held or frame
            yield from due(frame.time)
        held = frame
        if end is not None and frame.time >= end:
            return
    if held is not None:
        yield from due(held.time + held.duration)


def open_clip(
    path: str | Path,
    *,
    start: float | Fraction = 0,
    duration: float | Fraction | None = None,
    rate: float | Fraction | None = None,
    every_nth: int = 1,
    max_frames: int | None = None,
    width: int | None = None,
    height: int | None = None,
    fit: Fit = "crop",
    stream: int | None = None,
) -> Clip:
    """Looks into a file and describes a piece of it. Arguments as of :class:`Clip`; 0 means None where that is a choice.

    Args:
        stream: None is the one that the file flags as default, or its first.

    Raises:
        InputError: a missing or unreadable file, no video stream, a size, rate or span that makes no sense.
    """
    path = Path(path)
    for name, value, low in (
        ("start", start, 0),
        ("duration", duration, 0),
        ("rate", rate, 0),
        ("every_nth", every_nth, 1),
        ("max_frames", max_frames, 0),
    ):
        if value is not None and not low <= value < float("inf"):
            raise InputError(f"{name} = {value} is out of range; give {low} or more")
    for name, value in (("width", width), ("height", height)):
        if value and not MIN_SIDE <= value <= MAX_SIDE:
            raise InputError(
                f"{name} = {value} is out of range; give {MIN_SIDE} to {MAX_SIDE} pixels, or 0 for the source's"
            )
    if fit not in get_args(Fit):
        raise InputError(f"fit = {fit} is unknown; give {', '.join(get_args(Fit))}")
    info = probe(path, stream)
    start = Fraction(start).limit_denominator(100_000)
    if info.duration is not None and start >= info.duration > 0:
        raise InputError(
            f"{path}: start = {float(start):g} s is past the end; the video is {float(info.duration):.3f} s long. Lower start."
        )
    clip = Clip(
        path,
        info,
        start,
        Fraction(duration).limit_denominator(100_000) if duration else None,
        exact_rate(rate) if rate else None,
        every_nth,
        max_frames or None,
        width or None,
        height or None,
        fit,
        info.stream,
    )
    if min(clip.size) < MIN_SIDE or max(clip.size) > MAX_SIDE:
        given = " and ".join(f"{n} = {v}" for n, v in (("width", width), ("height", height)) if v) or "its own size"
        raise InputError(
            f"{path}: with {given}, frames are {clip.size[0]}x{clip.size[1]}; each side must be {MIN_SIDE} to {MAX_SIDE} pixels"
        )
    return clip


def exact_rate(value: float | Fraction) -> Fraction:
    """Exact for fractions; a float is read as the nearby ratio that was meant: 29.97 is 30000/1001."""
    if isinstance(value, Fraction):
        return value
    for base in (24, 30, 48, 60, 120):
        if abs(value - base / 1.001) < 0.003:
            return Fraction(base * 1000, 1001)
    return Fraction(value).limit_denominator(100_000)


def read_frames(clip: Clip, first: int, count: int, monitor: Monitor = ignore) -> Tensor:
    """Some frames of a clip ``[n, H, W, 3]`` in 0..1, fewer where it ends.

    ``monitor`` is told before every frame, those before the first too. Raises InputError where there is none.
    """

    def before_frame(index: int) -> None:
        monitor(Progress("read", index, first + count))

    images = [frame.image.movedim(0, -1) for frame in islice(clip.frames(first, before_frame=before_frame), count)]
    if not images:
        raise InputError(f"first = {first} is beyond the end of {clip.path}; give a smaller number")
    return torch.stack(images)


def describe(clip: Clip) -> str:
    """A clip's facts in a few lines for a person."""
    info = clip.info
    length = "unknown length" if info.duration is None else f"{float(info.duration):.2f} s"
    lines = [
        f"{clip.path.name}: {info.width}x{info.height}, {float(info.rate):.3f} frames/s, {length}, {info.codec} {info.bits} bit",
        f"read as {clip.size[0]}x{clip.size[1]} at {float(clip.nominal_rate):.3f} frames/s from {float(clip.start):.2f} s",
    ]
    lines += [f"audio: {a.codec}, {a.rate} Hz, {a.layout}" for a in info.audio] or ["no audio"]
    return "\n".join([*lines, *info.notices])
