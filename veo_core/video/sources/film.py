"""Frames of a file with streams, through PyAV."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.stream import VideoStream
from torch import Tensor

from ...errors import InputError
from ..color import Codes, ColorTags, has_alpha, is_rgb, read_tags, reformat, to_rgb, tone_map
from ..container import (
    audio_streams,
    channel_orders,
    decodes,
    open_input,
    seekable,
    usual_video,
    video_streams,
)
from ..info import STILL_RATE, THUMBNAIL, AudioInfo, Clock, Decoded, ReadReport, VideoInfo
from ..scale import scale

log = logging.getLogger(__name__)

# FFmpeg's own decoders leave transparency out, which lies beside the packets.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# Seconds; nearer starts are reached as fast by reading on.
SEEK_FROM = Fraction(2)


def probe(path: Path, stream: int | None) -> VideoInfo:
    """What a file says of itself, and its first frame. Raises InputError that says what is wrong with the file."""
    try:
        with open_input(path) as container:
            info = _probe(path, container, stream)
        return _with_sound(path, info)
    except av.FFmpegError as e:
        raise InputError(f"{path} is not a video that can be read ({e.strerror}); give a video file") from e


def _probe(path: Path, container: InputContainer, stream: int | None) -> VideoInfo:
    videos = video_streams(container)
    if not videos:
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
        raise InputError(f"{path} has no video stream (it holds {kinds}); give a file with pictures")
    stream = usual_video(videos) if stream is None else stream
    if not 0 <= stream < len(videos):
        raise InputError(f"{path} has {len(videos)} video streams; stream = {stream} is not one of them, count from 0")
    video = videos[stream]
    if video.codec_context is None:
        raise InputError(f"{path}: this FFmpeg has no decoder for its video; re-encode it, such as to H.264")
    frame = next(_frames_of(container, video, ReadReport()), None)
    if frame is None:
        raise InputError(
            f"{path}: no frame could be decoded. The file is empty or damaged; play or re-encode it to check."
        )
    tags = _tags(path, frame)
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
    duration = None
    if video.duration is not None:
        duration = video.duration * video.time_base
    elif container.duration is not None:
        duration = Fraction(container.duration, av.time_base)
    return VideoInfo(
        width,
        height,
        Fraction(video.average_rate or video.guessed_rate or STILL_RATE),
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
        stream,
        _origin(container, video, frame),
        (),
        tuple(notices),
    )


def _with_sound(path: Path, info: VideoInfo) -> VideoInfo:
    """The sound tracks that can be decoded, each tried from the file's beginning."""
    orders = channel_orders(path)
    found, refused = [], 0
    with open_input(path) as container:
        known, refused = audio_streams(container)
        count = len(known)
    for place in range(count):
        # Afresh for each: a container cannot go back where it has no index.
        with open_input(path) as container:
            track = audio_streams(container)[0][place]
            if found or decodes(container, track):
                context = track.codec_context
                found.append(
                    AudioInfo(
                        track.index,
                        context.name,
                        context.sample_rate,
                        context.layout.nb_channels,
                        context.layout.name,
                        orders.get(track.index, ()),
                    )
                )
            else:
                refused += 1
    notices = info.notices
    if refused and not found:
        notices += ("its sound cannot be decoded here and is left out; convert it, such as to AAC, to keep it",)
    elif refused:
        notices += (f"sound that cannot be decoded here is left out; the {found[0].codec} track is taken",)
    return VideoInfo(**vars(info) | {"audio": tuple(found), "notices": notices})


def _tags(path: Path, frame: av.VideoFrame) -> ColorTags:
    try:
        return read_tags(frame)
    except ValueError as e:
        raise InputError(f"{path}: {e}") from e


def _orientation(frame: av.VideoFrame) -> tuple[int, bool]:
    """Clockwise quarter turns (degrees) and mirroring of a display matrix: out = R(rotation) then, if set, flip x."""
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:
        # PyAV gives none of it where FFmpeg knows a kind that it does not; the angle it asks FFmpeg for.
        return -round(frame.rotation / 90) * 90 % 360, False
    if matrix is None:
        return 0, False
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    mirrored = a * d - b * c < 0
    if mirrored:
        a, c = -a, -c
    turn = {(1, 0): 0, (0, 1): 90, (-1, 0): 180, (0, -1): 270}
    key = tuple(0 if abs(v) < 1 << 15 else (1 if v > 0 else -1) for v in (a, b))
    return turn.get(key, 0), mirrored


def _stamp(container: InputContainer, video: VideoStream, frame: av.VideoFrame) -> Fraction | None:
    """When a frame is shown, seconds. AVI has no presentation times; what is guessed of them jumps to and fro."""
    stamp = frame.dts if container.format.name == "avi" else frame.pts
    return None if stamp is None else stamp * (frame.time_base or video.time_base)


def _origin(container: InputContainer, video: VideoStream, frame: av.VideoFrame) -> Fraction:
    """Time stamp of the first picture. That of a decoded frame is, in AVI, of a packet some frames later."""
    if container.format.name == "avi":
        return (video.start_time or 0) * video.time_base
    return _stamp(container, video, frame) or Fraction(0)


def _decoder(video: VideoStream) -> Callable[[av.Packet], list[av.VideoFrame]]:
    name = _ALPHA_DECODERS.get(video.codec_context.name)
    if name and video.metadata.get("alpha_mode") == "1" and name in av.codecs_available:
        return av.CodecContext.create(name, "r").decode
    if not video.codec_context.is_open:
        video.thread_type = "AUTO"
    return lambda packet: packet.decode()


def _frames_of(container: InputContainer, video: VideoStream, report: ReadReport) -> Iterator[av.VideoFrame]:
    """Decodes a stream; a packet that cannot be decoded is counted and left out."""
    decode = _decoder(video)
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
            for frame in decode(packet):
                if frame.is_corrupt:
                    report.corrupt_packets += 1
                yield frame
        except av.EOFError:
            return
        except av.FFmpegError:
            report.corrupt_packets += 1


def decode(path: Path, stream: int, report: ReadReport, start: Fraction = Fraction(0)) -> Iterator[Decoded]:
    """Frames in order, from the last key frame before ``start`` where the container has an index of them."""
    with open_input(path) as container:
        video = video_streams(container)[stream]
        frames = _frames_of(container, video, report)
        first = next(frames, None)
        if first is None:
            return
        begin = _stamp(container, video, first) or Fraction(0)
        frames = chain([first], frames)
        if start > SEEK_FROM and seekable(container):
            frames = _sought(container, video, begin + start)
        if frames is not None:
            yield from _timed(path, container, video, frames, begin, report)
            return
    # The seek led nowhere: from the beginning, on a container that has not moved.
    with open_input(path) as container:
        video = video_streams(container)[stream]
        yield from _timed(path, container, video, _frames_of(container, video, report), begin, report)


def _sought(container: InputContainer, video: VideoStream, target: Fraction) -> Iterator[av.VideoFrame] | None:
    """Frames from a key frame at or before a time stamp in seconds; None where the container leads to none."""
    report = ReadReport()
    try:
        container.seek(int(target / video.time_base), stream=video, backward=True)
    except av.FFmpegError:
        return None
    frames = _frames_of(container, video, report)
    # Pictures before the key frame lean on what was not decoded.
    key = next((f for f in frames if f.key_frame), None)
    if key is None or key.is_corrupt or (stamp := _stamp(container, video, key)) is None or stamp > target:
        return None
    return chain([key], frames)


def _timed(
    path: Path,
    container: InputContainer,
    video: VideoStream,
    frames: Iterator[av.VideoFrame],
    begin: Fraction,
    report: ReadReport,
) -> Iterator[Decoded]:
    interval = 1 / Fraction(video.average_rate or video.guessed_rate or STILL_RATE)
    clock = Clock(interval, begin, report)
    for frame in frames:
        time = clock.at(_stamp(container, video, frame))
        if time is None:
            continue
        base = frame.time_base or video.time_base
        duration = frame.duration * base if frame.duration else interval
        tags = _tags(path, frame)
        yield Decoded(
            time,
            duration,
            partial(_convert, frame, tags, video.sample_aspect_ratio),
            partial(thumbnail, frame),
            partial(Codes.of, frame, tags) if _plain(frame, tags, video.sample_aspect_ratio) else None,
        )
    length = video.duration * video.time_base if video.duration else None
    if length is None and container.duration and len(container.streams) == 1:
        length = Fraction(container.duration, av.time_base)
    if length and clock.previous + interval * Fraction(3, 2) < length:
        report.truncated = True


def _plain(frame: av.VideoFrame, tags: ColorTags, aspect: Fraction | None) -> bool:
    """Whether a frame becomes a picture by its matrix alone."""
    turned = _orientation(frame) != (0, False)
    return not (is_rgb(frame) or tags.hdr or has_alpha(frame.format.name) or turned or (aspect and aspect != 1))


def _convert(frame: av.VideoFrame, tags: ColorTags, aspect: Fraction | None) -> tuple[Tensor, Tensor | None]:
    rgb, alpha = to_rgb(frame, tags)
    if tags.hdr:
        rgb = tone_map(rgb, tags)
    image = torch.from_numpy(np.ascontiguousarray(rgb, dtype=np.float32))
    if alpha is not None:
        image = torch.cat([image, torch.from_numpy(np.ascontiguousarray(alpha, dtype=np.float32))])
    if aspect and aspect != 1:
        image = scale(image, max(1, round(frame.width * aspect)), frame.height)
    rotation, mirrored = _orientation(frame)
    image = torch.rot90(image, -(rotation // 90), (1, 2))
    if mirrored:
        image = image.flip(2)
    image = image.contiguous()
    return image[:3], image[3:] if alpha is not None else None


def thumbnail(frame: av.VideoFrame) -> Tensor:
    """A frame as a quick picture ``[3, 36, 64]``, about 0..1."""
    height, width = THUMBNAIL
    pixels = reformat(frame, width=width, height=height, format="rgb24", interpolation="AREA").to_ndarray()
    return torch.from_numpy(pixels).movedim(-1, 0).float() / 255
