"""Opening media files with any PyAV, and which of their streams are read."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path

import av
from av.container import InputContainer

# PyAV before 19 raises at tags that are not UTF-8 unless told otherwise; from 19 on it has no such setting.
_LENIENT = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
# Streams without a container: their demuxers take 25 frames a second for granted, whatever the stream says.
_BARE = frozenset({"h264", "hevc", "vvc", "evc", "m4v", "mpegvideo", "vc1", "cavsvideo", "obu"})
LOOKED_AT = 256
_MOST_HEADERS = 256 << 20
_LAYOUTS = (
    "mono", "stereo", "2.1", "3.0", "3.0(back)", "4.0", "quad", "quad(side)", "3.1", "5.0", "5.0(side)", "4.1", "5.1", "5.1(side)",
    "6.0", "6.1", "7.0", "7.1", "7.1(wide)", "octagonal",
)  # fmt: skip


def open_input(path: Path) -> InputContainer:
    """A media file opened for reading, whatever is wrong with its tags.

    A bare stream is timed by the rate that it says itself. Raises av.error.FFmpegError and OSError.
    """
    # By its full path: a colon in a relative one would be read as a protocol.
    path = Path(path).absolute()
    container = av.open(path, **_LENIENT)
    if container.format.name in _BARE and container.streams.video:
        video = container.streams.video[0]
        rate = video.codec_context.framerate
        if rate and rate != video.average_rate:
            container.close()
            container = av.open(path, options={"framerate": str(Fraction(rate))}, **_LENIENT)
    _set_layouts(path, container)
    return container


def seekable(container: InputContainer) -> bool:
    """Whether it has an index to be sought in; others are read from their beginning."""
    return container.format.name.split(",")[0] in ("mov", "matroska")


def video_streams(container: InputContainer) -> list[av.video.stream.VideoStream]:
    """The streams that are films; cover pictures are not."""
    return [v for v in container.streams.video if not v.disposition & av.stream.Disposition.attached_pic]


def usual_video(videos: list[av.video.stream.VideoStream]) -> int:
    """Which of these to take when nobody says: one that moves, one that is flagged as default, the first, in that order."""
    default = av.stream.Disposition.default

    def rank(index: int) -> tuple[bool, bool]:
        return videos[index].frames != 1, bool(videos[index].disposition & default)

    return max(range(len(videos)), key=rank)


def audio_streams(container: InputContainer) -> tuple[list[av.audio.stream.AudioStream], int]:
    """Sound tracks that can be decoded, those flagged as default first, and how many cannot be."""
    every = container.streams.audio
    default = av.stream.Disposition.default
    known = [a for a in every if a.codec_context is not None and a.codec_context.sample_rate]
    known.sort(key=lambda a: not a.disposition & default)
    return known, len(every) - len(known)


def decodes(container: InputContainer, stream: av.audio.stream.AudioStream) -> bool:
    """Whether the first packets of a sound track can be decoded. Moves the container's place; True where it has none."""
    tried = 0
    for packet in islice(container.demux(), LOOKED_AT):
        if packet.stream.index != stream.index or not packet.size:
            continue
        tried += 1
        try:
            if packet.decode():
                return True
        except av.FFmpegError:
            continue
    return tried < 8


def _set_layouts(path: Path, container: InputContainer) -> None:
    """Gives sound tracks whose channels stand in an order of their own the usual layout of as many channels.

    PyAV frees such an order twice as soon as it is looked at, which ends the process. Only what Apple's containers say
    of channels makes such orders.
    """
    if container.format.name.split(",")[0] not in ("mov", "caf") or not container.streams.audio:
        return
    for index, names in channel_orders(path).items():
        stream = container.streams[index]
        if stream.codec_context is not None:
            stream.codec_context.layout = usual_layout(names) or f"{len(names)}C"


def usual_layout(names: tuple[str, ...]) -> str | None:
    """The layout of FFmpeg's own that has just these channels, in whatever order; None where there is none."""
    fitting = (name for name in _LAYOUTS if set(channel_names(name)) == set(names))
    same_count = (name for name in reversed(_LAYOUTS) if len(channel_names(name)) == len(names))
    return next(fitting, None) or next(same_count, None)


def channel_names(layout: str) -> tuple[str, ...]:
    """Names of a layout's channels in its order, such as FL and FR."""
    return tuple(c.name for c in av.AudioLayout(layout).channels)


def channel_orders(path: Path) -> dict[int, tuple[str, ...]]:
    """Names of the channels of each sound track that has an order of its own, by the stream's index.

    Looked up in a process of its own, which may end as it likes.
    """
    status = path.stat()
    return _orders(path, status.st_size, status.st_mtime_ns) if _names_channels(path) else {}


# Leaves at once: nothing that was freed by being printed is freed again.
_ASKED = """
import os, sys, av
known = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
for s in av.open(sys.argv[1], **known).streams:
    if s.type == "audio" and s.codec_context is not None:
        print(s.index, repr(s), flush=True)
os._exit(0)
"""


@lru_cache(maxsize=256)
def _orders(path: Path, size: int, modified: int) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    told = subprocess.run(
        [sys.executable, "-c", _ASKED, str(path)], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=60, check=False,
    ).stdout  # fmt: skip
    for line in told.splitlines():
        if match := re.match(r"(\d+) .*\b\d+ channels \(([A-Z0-9@+]+)\)", line):
            found[int(match[1])] = tuple(match[2].split("+"))
    return found


def _names_channels(path: Path) -> bool:
    """Whether a QuickTime or Core Audio file says which channel is which (its atoms ``chan`` and ``chnl``)."""
    with path.open("rb") as file:
        if file.read(4) == b"caff":
            return b"chan" in file.read(1 << 16)
        place, size = 0, path.stat().st_size
        while place + 8 <= size:
            file.seek(place)
            length, kind = struct.unpack(">I4s", file.read(8))
            if length == 1:
                length = struct.unpack(">Q", file.read(8).ljust(8, b"\0"))[0]
            if kind in (b"moov", b"moof"):
                held = file.read(min(length or size, _MOST_HEADERS))
                return b"chan" in held or b"chnl" in held
            if length < 8:
                return False
            place += length
    return False
