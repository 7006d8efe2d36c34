"""What is known of a video before and while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from .color import Codes, ColorTags

STILL_RATE = Fraction(24)
THUMBNAIL = (36, 64)
# Frames that stamps go back by, where another piece begins; by less they repeat what was shown. Frames that one leaves
# out, where the piece was one stray stamp.
BACK, AHEAD = Fraction(1, 2), Fraction(3, 2)


@dataclass(frozen=True)
class AudioInfo:
    """One audio stream: its place in the file, codec, rate in Hz, channel count and layout name.

    Attributes:
        order: names of the channels where the file has them in another order than the layout.
    """

    index: int
    codec: str
    rate: int
    channels: int
    layout: str
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class VideoInfo:
    """What a file says of itself before it is decoded.

    Attributes:
        width, height: as displayed, after rotation and pixel aspect ratio.
        rate: average frames per second.
        duration: seconds, or None where the file does not say.
        bits: per component. alpha: whether there is transparency.
        rotation: degrees clockwise to turn the coded picture; mirrored: flipped left to right after that.
        pixel_aspect: width over height of one coded pixel.
        stream: which of the file's video streams it is, of ``video_streams``.
        origin: time stamp of the first picture in the file, seconds.
        audio: sound tracks that can be decoded, the one to take first.
        notices: what a person should know, such as tone mapping or interlacing.
    """

    width: int
    height: int
    rate: Fraction
    duration: Fraction | None
    codec: str
    bits: int
    alpha: bool
    tags: ColorTags
    rotation: int = 0
    mirrored: bool = False
    pixel_aspect: Fraction = Fraction(1)
    interlaced: bool = False
    video_streams: int = 1
    stream: int = 0
    origin: Fraction = Fraction(0)
    audio: tuple[AudioInfo, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass
class Decoded:
    """A decoded frame that has not been converted yet.

    Attributes:
        time, duration: seconds since the stream began, and how long it shows.
        convert: makes its picture ``[3, H, W]`` and transparency. thumbnail: makes a small one.
        codes: makes what the picture can be made of elsewhere by its matrix alone; None where more than that is to do.
    """

    time: Fraction
    duration: Fraction
    convert: Callable[[], tuple[Tensor, Tensor | None]]
    thumbnail: Callable[[], Tensor]
    codes: Callable[[], Codes] | None = None


@dataclass
class ReadReport:
    """What went wrong while a clip was read.

    Attributes:
        corrupt_packets: packets that could not be decoded. truncated: the file ends early.
        jumps: time stamps that jump back, where another piece begins. repeats: frames left out whose stamps repeat.
    """

    corrupt_packets: int = 0
    truncated: bool = False
    jumps: int = 0
    repeats: int = 0

    @property
    def notices(self) -> list[str]:
        out = []
        if self.corrupt_packets:
            out.append(f"{self.corrupt_packets} corrupt packets were skipped; the other frames keep their times")
        if self.truncated:
            out.append("the file ends early; what is there was used")
        if self.jumps:
            out.append(f"time stamps jump back {self.jumps} times; the frames after a jump follow those before it")
        if self.repeats:
            out.append(
                f"{self.repeats} frames were left out: their time stamps repeat, or lie before those shown already"
            )
        return out


@dataclass
class Clock:
    """Time stamps, which may be missing, repeat or go back, to seconds since the first frame that only ascend.

    Args:
        interval: seconds between frames, where stamps are missing.
        begin: stamp of the first frame, seconds.
        report: is told of what is wrong.
    """

    interval: Fraction
    begin: Fraction
    report: ReadReport = field(default_factory=ReadReport)

    def __post_init__(self) -> None:
        self.previous = -self.interval
        self._left: Fraction | None = None

    def at(self, stamp: Fraction | None) -> Fraction | None:
        """The next frame's seconds; None for one to leave out."""
        expected = self.previous + self.interval
        time = expected if stamp is None else stamp - self.begin
        if self._left is not None and time - expected > AHEAD * self.interval and stamp - self._left > self.previous:
            # One stray stamp: the others go on where they were.
            self.begin = self._left
            time = stamp - self.begin
        self._left = None
        if time <= self.previous - BACK * self.interval:
            self._left, self.begin = self.begin, stamp - expected
            self.report.jumps += 1
            time = expected
        elif time <= self.previous:
            self.report.repeats += 1
            return None
        self.previous = time
        return time
