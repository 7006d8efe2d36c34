"""Video in: a lazy clip that is read frame by frame, timed by presentation time stamps."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import av
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, ImageSequence
from torch import Tensor

from ..errors import InputError
from .color import ColorTags, has_alpha, tags_of, to_rgb, tone_map
from .container import open_input

log = logging.getLogger(__name__)

STILL_RATE = Fraction(24)
STILL_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})
MIN_SIDE, MAX_SIDE = 16, 16384
THUMBNAIL = (36, 64)
# Containers round time stamps to a millisecond.
SAME_TIME = Fraction(1, 1000)
Fit = Literal["stretch", "crop", "pad"]


@dataclass(frozen=True)
class AudioInfo:
    """One audio stream: its place in the file, codec, rate in Hz, channel count and layout name."""

    index: int
    codec: str
    rate: int
    channels: int
    layout: str


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
        origin: time stamp of the first picture in the file, seconds.
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
    origin: Fraction = Fraction(0)
    audio: tuple[AudioInfo, ...] = ()
    notices: tuple[str, ...] = ()


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


@dataclass
class _Decoded:
    """A decoded frame that has not been converted yet: seconds since the stream began, and how long it shows."""

    time: Fraction
    duration: Fraction
    convert: Callable[[], tuple[Tensor, Tensor | None]]
    thumbnail: Callable[[], Tensor]


@dataclass
class ReadReport:
    """What went wrong while a clip was read: undecodable packets, an early end, times that jump back."""

    corrupt_packets: int = 0
    truncated: bool = False
    jumps: int = 0

    @property
    def notices(self) -> list[str]:
        out = []
        if self.corrupt_packets:
            out.append(f"{self.corrupt_packets} corrupt packets were skipped; the other frames keep their times")
        if self.truncated:
            out.append("the file ends early; what is there was used")
        if self.jumps:
            out.append(f"time stamps jump back {self.jumps} times; the frames after a jump follow those before it")
        return out


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
        self, first: int = 0, report: ReadReport | None = None, progress: Callable[[int], None] = lambda index: None
    ) -> Iterator[Frame]:
        """Frames from index ``first`` on, one at a time. ``progress`` is told of each index, those passed over too.

        Raises:
            InputError: when the file has no frame in the asked span.
        """
        report = report if report is not None else ReadReport()
        origin: Fraction | None = None
        found = False
        for index, (time, decoded) in enumerate(self._selected(report)):
            found = True
            origin = time if origin is None else origin
            progress(index)
            if index >= first:
                image, alpha = decoded.convert()
                yield Frame(index, time - origin, self._resize(image), None if alpha is None else self._resize(alpha))
        if not found:
            raise InputError(self._nothing_read())

    def scaled(self, width: int, height: int) -> Clip:
        """The same clip at another size, cropped or padded as this one is."""
        fit = self.fit if self.width and self.height else "stretch"
        return replace(self, width=width, height=height, fit=fit)

    def picked(self, indices: Collection[int], progress: Callable[[int], None] = lambda index: None) -> Iterator[Frame]:
        """The frames with these indices, in order; the others are not converted. Fewer where the clip is shorter.

        ``progress`` is told of every index.
        """
        last = max(indices, default=-1)
        origin: Fraction | None = None
        for index, (time, decoded) in enumerate(self._selected(ReadReport())):
            origin = time if origin is None else origin
            progress(index)
            if index in indices:
                yield Frame(index, time - origin, self._resize(decoded.convert()[0]))
            if index >= last:
                return

    def thumbnails(self, report: ReadReport | None = None) -> Iterator[tuple[Fraction, Fraction, Tensor]]:
        """Every frame as a quick 64x36 picture, for a look at the whole clip.

        Yields:
            Seconds from the first frame, seconds on show, float32 ``[3, 36, 64]`` in about 0..1, not turned upright.
        """
        origin: Fraction | None = None
        for time, decoded in self._selected(report if report is not None else ReadReport()):
            origin = time if origin is None else origin
            shown = self.every_nth / self.rate if self.rate else decoded.duration * self.every_nth
            yield time - origin, shown, decoded.thumbnail()
        if origin is None:
            raise InputError(self._nothing_read())

    def _nothing_read(self) -> str:
        if self.start > 0:
            length = "unknown length" if self.info.duration is None else f"{float(self.info.duration):.3f} s long"
            return f"{self.path}: no frame at or after start = {float(self.start):g} s; the video is {length}. Lower start."
        return f"{self.path}: no frame could be decoded. The file is empty or damaged; play or re-encode it to check."

    def _selected(self, report: ReadReport) -> Iterator[tuple[Fraction, _Decoded]]:
        source = _decode_stills(self.path) if _is_stills(self.path) else _decode(self.path, self.stream, report)
        end = None if self.duration is None else self.start + self.duration
        timed = _at_rate(source, self.rate, self.start, end) if self.rate else _between(source, self.start, end)
        return islice(timed, 0, None if self.max_frames is None else self.max_frames * self.every_nth, self.every_nth)

    def _resize(self, image: Tensor) -> Tensor:
        width, height = self.size
        h, w = image.shape[-2:]
        if (w, h) == (width, height):
            return image
        if self.fit == "stretch" or not (self.width and self.height):
            return _scale(image, width, height)
        pick = max if self.fit == "crop" else min
        scale = pick(Fraction(width, w), Fraction(height, h))
        inner_w, inner_h = max(1, round(w * scale)), max(1, round(h * scale))
        image = _scale(image, inner_w, inner_h)
        left, top = (width - inner_w) // 2, (height - inner_h) // 2
        return F.pad(image, (left, width - inner_w - left, top, height - inner_h - top))


def _scale(image: Tensor, width: int, height: int) -> Tensor:
    """Antialiased bicubic: an area-like filter where the picture shrinks, Lanczos-like where it grows."""
    if image.shape[-2:] == (height, width):
        return image
    out = F.interpolate(image[None], (height, width), mode="bicubic", align_corners=False, antialias=True)
    return out[0].clamp(0, 1)


def _between(source: Iterator[_Decoded], start: Fraction, end: Fraction | None) -> Iterator[tuple[Fraction, _Decoded]]:
    """Frames from ``start`` on; the one on show at ``start`` begins there."""
    on_show: _Decoded | None = None
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
    source: Iterator[_Decoded], rate: Fraction, start: Fraction, end: Fraction | None
) -> Iterator[tuple[Fraction, _Decoded]]:
    """The frame on show at ``start + k / rate`` for every k while the video lasts."""
    count = 0
    held: _Decoded | None = None

    def due(until: Fraction) -> Iterator[tuple[Fraction, _Decoded]]:
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
    stream: int = 0,
) -> Clip:
    """Looks into a file and describes a piece of it. Arguments as of :class:`Clip`; 0 means None where that is a choice.

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
        stream,
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


def probe(path: Path, stream: int = 0) -> VideoInfo:
    """Reads a file's headers and its first frame. Raises InputError that says what is wrong with the file."""
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a video, an animated picture or a folder of stills")
    if _is_stills(path):
        return _probe_stills(path)
    if path.is_dir():
        raise InputError(
            f"{path} is a folder without pictures; give a folder of {', '.join(sorted(STILL_SUFFIXES))} files"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty (0 bytes); export or download it again")
    try:
        with open_input(path) as container:
            return _probe_container(path, container, stream)
    except av.FFmpegError as e:
        raise InputError(f"{path} is not a video that can be read ({e.strerror}); give a video file") from e


def _probe_container(path: Path, container: av.container.InputContainer, stream: int) -> VideoInfo:
    videos = [v for v in container.streams.video if not v.disposition & av.stream.Disposition.attached_pic]
    if not videos:
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
        raise InputError(f"{path} has no video stream (it holds {kinds}); give a file with pictures")
    if not 0 <= stream < len(videos):
        raise InputError(f"{path} has {len(videos)} video streams; stream = {stream} is not one of them, count from 0")
    video = videos[stream]
    audio = tuple(
        AudioInfo(
            a.index,
            a.codec_context.name,
            a.codec_context.sample_rate,
            a.codec_context.channels,
            a.codec_context.layout.name,
        )
        for a in container.streams.audio
        if a.codec_context is not None and a.codec_context.sample_rate
    )
    frame = next(_frames_of(container, video, ReadReport()), None)
    if frame is None:
        raise InputError(
            f"{path}: no frame could be decoded. The file is empty or damaged; play or re-encode it to check."
        )
    tags = tags_of(frame)
    rotation, mirrored = _orientation(frame)
    aspect = Fraction(video.sample_aspect_ratio or 1) or Fraction(1)
    width, height = max(1, round(frame.width * aspect)), frame.height
    if rotation % 180:
        width, height = height, width
    notices = []
    if tags.hdr:
        notices.append(f"{'PQ' if tags.transfer == 16 else 'HLG'} high dynamic range is tone-mapped to BT.709")
    if frame.interlaced_frame:
        notices.append("the video is interlaced and is read as it is; deinterlace it first for the best result")
    rate = video.average_rate or video.guessed_rate or STILL_RATE
    duration = None
    if video.duration is not None:
        duration = video.duration * video.time_base
    elif container.duration is not None:
        duration = Fraction(container.duration, av.time_base)
    return VideoInfo(
        width,
        height,
        Fraction(rate),
        duration,
        video.codec_context.codec.canonical_name,
        max(c.bits for c in frame.format.components),
        has_alpha(frame.format.name),
        tags,
        rotation,
        mirrored,
        aspect,
        bool(frame.interlaced_frame),
        len(videos),
        (frame.pts or 0) * (frame.time_base or video.time_base),
        audio,
        tuple(notices),
    )


def _orientation(frame: av.VideoFrame) -> tuple[int, bool]:
    """Clockwise quarter turns (degrees) and mirroring of a display matrix: out = R(rotation) then, if set, flip x."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    mirrored = a * d - b * c < 0
    if mirrored:
        a, c = -a, -c
    turn = {(1, 0): 0, (0, 1): 90, (-1, 0): 180, (0, -1): 270}
    key = tuple(0 if abs(v) < 1 << 15 else (1 if v > 0 else -1) for v in (a, b))
    return turn.get(key, 0), mirrored


def _frames_of(container, video, report: ReadReport) -> Iterator[av.VideoFrame]:
    """Decodes a stream; a packet that cannot be decoded is counted and left out."""
    video.thread_type = "AUTO"
    packets = container.demux(video)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.EOFError:
            return
        except av.FFmpegError as e:
            log.debug("demuxing stopped: %s", e)
            report.truncated = True
            return
        try:
            for frame in packet.decode():
                if frame.is_corrupt:
                    report.corrupt_packets += 1
                yield frame
        except av.EOFError:
            return
        except av.FFmpegError:
            report.corrupt_packets += 1


def _decode(path: Path, stream: int, report: ReadReport) -> Iterator[_Decoded]:
    with open_input(path) as container:
        video = [v for v in container.streams.video if not v.disposition & av.stream.Disposition.attached_pic][stream]
        interval = 1 / Fraction(video.average_rate or video.guessed_rate or STILL_RATE)
        begin: Fraction | None = None
        previous = -interval
        for frame in _frames_of(container, video, report):
            base = frame.time_base or video.time_base
            # AVI has no presentation times; what is guessed for reordered pictures jumps to and fro.
            stamp = frame.dts if container.format.name == "avi" else frame.pts
            time = stamp * base if stamp is not None else (begin or 0) + previous + interval
            begin = time if begin is None else begin
            time -= begin
            if time <= previous - 1:
                begin += time - previous - interval
                time = previous + interval
                report.jumps += 1
            if time <= previous:
                continue
            previous = time
            duration = frame.duration * base if frame.duration else interval
            aspect = video.sample_aspect_ratio
            yield _Decoded(time, duration, partial(_convert, frame, aspect), partial(_thumbnail, frame))
        if video.duration and previous + interval * Fraction(3, 2) < video.duration * video.time_base:
            report.truncated = True


def _convert(frame: av.VideoFrame, aspect: Fraction | None) -> tuple[Tensor, Tensor | None]:
    tags = tags_of(frame)
    rgb, alpha = to_rgb(frame, tags)
    if tags.hdr:
        rgb = tone_map(rgb, tags)
    image = torch.from_numpy(np.ascontiguousarray(rgb, dtype=np.float32))
    if alpha is not None:
        image = torch.cat([image, torch.from_numpy(np.ascontiguousarray(alpha, dtype=np.float32))])
    if aspect and aspect != 1:
        image = _scale(image, max(1, round(frame.width * aspect)), frame.height)
    rotation, mirrored = _orientation(frame)
    image = torch.rot90(image, -(rotation // 90), (1, 2))
    if mirrored:
        image = image.flip(2)
    image = image.contiguous()
    return image[:3], image[3:] if alpha is not None else None


def _thumbnail(frame: av.VideoFrame) -> Tensor:
    height, width = THUMBNAIL
    pixels = frame.reformat(width=width, height=height, format="rgb24", interpolation="AREA").to_ndarray()
    return torch.from_numpy(pixels).movedim(-1, 0).float() / 255


def _still_thumbnail(still: Image.Image) -> Tensor:
    small = still.convert("RGB").resize(THUMBNAIL[::-1], Image.Resampling.BOX)
    return torch.from_numpy(np.array(small)).movedim(-1, 0).float() / 255


def _is_stills(path: Path) -> bool:
    if path.is_dir():
        return any(p.suffix.lower() in STILL_SUFFIXES for p in path.iterdir())
    return path.suffix.lower() == ".webp"


def _still_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]

    def natural(p: Path) -> list:
        parts = "".join(c if c.isdigit() else " " for c in p.stem).split()
        return [[int(n) for n in parts], p.name]

    return sorted((p for p in path.iterdir() if p.suffix.lower() in STILL_SUFFIXES), key=natural)


def _decode_stills(path: Path) -> Iterator[_Decoded]:
    """Animated WebP, which FFmpeg cannot animate, by its own durations; a folder at 24 frames a second."""
    time = Fraction(0)
    size: tuple[int, int] | None = None
    for file in _still_files(path):
        if _is_deep_png(file):
            frame = _deep_frame(file)
            size = size or (frame.width, frame.height)
            yield _Decoded(time, 1 / STILL_RATE, partial(_convert_deep, frame, size), partial(_thumbnail, frame))
            time += 1 / STILL_RATE
            continue
        with _open_still(file) as picture:
            for still in ImageSequence.Iterator(picture):
                own = still.copy()
                milliseconds = still.info.get("duration") if path.is_file() else None
                duration = Fraction(int(milliseconds), 1000) if milliseconds else 1 / STILL_RATE
                size = size or ImageOps.exif_transpose(own).size
                yield _Decoded(time, duration, partial(_convert_still, own, size), partial(_still_thumbnail, own))
                time += duration


def _is_deep_png(file: Path) -> bool:
    """Whether a PNG has 16 bits of colour, of which Pillow would keep 8: its header's bit depth and colour type."""
    with file.open("rb") as stream:
        head = stream.read(26)
    return head[:4] == b"\x89PNG" and head[24:25] == b"\x10" and head[25:26] in (b"\x02", b"\x06")


def _deep_frame(file: Path) -> av.VideoFrame:
    try:
        with av.open(file) as container:
            return next(container.decode(video=0))
    except (av.FFmpegError, StopIteration) as e:
        raise InputError(f"{file} is not a picture that can be read ({e}); remove or replace it") from e


def _convert_deep(frame: av.VideoFrame, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    image, alpha = _convert(frame, None)
    return _scale(image, *size), None if alpha is None else _scale(alpha, *size)


def _open_still(file: Path) -> Image.Image:
    try:
        picture = Image.open(file)
        picture.load()
    except Image.DecompressionBombError as e:
        raise InputError(f"{file} is too large a picture ({e}); scale it down") from e
    except (OSError, SyntaxError, ValueError) as e:
        raise InputError(f"{file} is not a picture that can be read ({e}); remove or replace it") from e
    return picture


def _convert_still(still: Image.Image, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    still = ImageOps.exif_transpose(still)
    transparent = still.has_transparency_data
    if still.mode.startswith("I"):
        # Pillow would clip 16-bit grey at 255.
        pixels = np.repeat(np.array(still, dtype=np.float32)[..., None] / 65535, 3, axis=2).clip(0, 1)
    else:
        pixels = np.array(still.convert("RGBA" if transparent else "RGB"), dtype=np.float32) / 255
    image = torch.from_numpy(pixels).movedim(-1, 0)
    image = _scale(image, *size) if still.size != size else image.contiguous()
    return image[:3], image[3:] if transparent else None


def _probe_stills(path: Path) -> VideoInfo:
    files = _still_files(path)
    with _open_still(files[0]) as picture:
        count = getattr(picture, "n_frames", 1) if path.is_file() else len(files)
        first = picture.info.get("duration") if path.is_file() else None
        rate = Fraction(1000, int(first)) if first else STILL_RATE
        upright = ImageOps.exif_transpose(picture)
        return VideoInfo(
            *upright.size, rate, count / rate, picture.format.lower(), 8, picture.has_transparency_data, ColorTags()
        )


def read_frames(clip: Clip, first: int, count: int, progress: Callable[[int], None] = lambda index: None) -> Tensor:
    """Some frames of a clip ``[n, H, W, 3]`` in 0..1, fewer where it ends.

    ``progress`` is told the index of every frame, those before the first too. Raises InputError where there is none.
    """
    images = [frame.image.movedim(0, -1) for frame in islice(clip.frames(first, progress=progress), count)]
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
