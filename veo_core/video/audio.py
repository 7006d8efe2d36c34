"""Audio of a clip: found, cut to the clip's span, copied or encoded beside the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from ..errors import InputError
from .reader import Clip


@dataclass(frozen=True)
class AudioTrack:
    """A span of the first audio stream of a file, held as a description.

    Attributes:
        path: the file.
        start: seconds after the first picture of the file's video.
        duration: seconds to take; shorter where the stream ends earlier.
    """

    path: Path
    start: Fraction
    duration: Fraction


@dataclass(frozen=True)
class Waveform:
    """Audio in memory: float32 samples ``[channels, n]`` in -1..1 at ``rate`` Hz."""

    samples: np.ndarray
    rate: int


def clip_audio(clip: Clip, duration: Fraction | None = None) -> AudioTrack | None:
    """The audio of a clip's file over its span, or None where there is none.

    Args:
        duration: seconds that the clip's frames last, once they are known; else the clip's own limit or the file's end.
    """
    if not clip.info.audio:
        return None
    rest = (clip.info.duration or Fraction(1 << 31)) - clip.start
    return AudioTrack(clip.path, clip.start, duration or min(rest, clip.duration or rest))


def _origin(container: av.container.InputContainer) -> Fraction:
    """Time of the file's first picture, which audio times are counted from."""
    for video in container.streams.video:
        if video.start_time is not None:
            return video.start_time * video.time_base
    return Fraction(0)


def read_waveform(track: AudioTrack) -> Waveform:
    """Decodes a span, sample-exact: silence stands in for samples missing before the stream's first.

    Raises InputError when the file has no audio.
    """
    parts: list[np.ndarray] = []
    with av.open(track.path) as container:
        if not container.streams.audio:
            raise InputError(f"{track.path} has no audio")
        stream = container.streams.audio[0]
        begin, rate = _origin(container) + track.start, stream.codec_context.sample_rate
        channels = stream.codec_context.channels
        wanted = round(track.duration * rate)
        resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
        position: int | None = None
        for frame in _decoded(container, stream):
            at = round((frame.pts * frame.time_base - begin) * rate) if frame.pts is not None else (position or 0)
            for out in resampler.resample(frame):
                samples = out.to_ndarray()
                if position is None:
                    position = at
                    if position > 0:
                        parts.append(np.zeros((samples.shape[0], min(position, wanted)), np.float32))
                first = max(0, -position)
                last = min(samples.shape[1], wanted - position)
                if last > first:
                    parts.append(samples[:, first:last])
                position += samples.shape[1]
            if position is not None and position >= wanted:
                break
    return Waveform(np.concatenate(parts, axis=1) if parts else np.zeros((channels, 0), np.float32), rate)


def _decoded(container, stream) -> Iterator[av.AudioFrame]:
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.FFmpegError:
            continue


def copied_packets(track: AudioTrack, out_stream) -> Iterator[av.Packet]:
    """Packets of a span, moved to begin at zero, for a stream of the same codec."""
    with av.open(track.path) as container:
        stream = container.streams.audio[0]
        begin = _origin(container) + track.start
        base = stream.time_base
        for packet in container.demux(stream):
            if packet.pts is None:
                continue
            time = packet.pts * base - begin
            length = (packet.duration or 0) * base
            if time + length / 2 < 0:
                continue
            if time + length / 2 > track.duration:
                return
            shift = round(begin / base)
            packet.pts = max(0, packet.pts - shift)
            packet.dts = packet.pts
            packet.stream = out_stream
            yield packet
