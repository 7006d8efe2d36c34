"""Audio of a clip: found, cut to the clip's span, copied or encoded beside the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from ..errors import InputError
from .container import open_input
from .reader import Clip


@dataclass(frozen=True)
class AudioTrack:
    """A span of the first audio stream of a file, held as a description.

    Attributes:
        path: the file.
        start: seconds after the first picture.
        duration: seconds to take; shorter where the stream ends earlier.
        origin: time stamp of the first picture in the file, seconds.
    """

    path: Path
    start: Fraction
    duration: Fraction
    origin: Fraction = Fraction(0)


@dataclass(frozen=True)
class Waveform:
    """Audio in memory: float32 samples ``[channels, n]`` in -1..1 at ``rate`` Hz."""

    samples: np.ndarray
    rate: int


def clip_audio(clip: Clip) -> AudioTrack | None:
    """The audio of a clip's file over its span, or None where there is none.

    How long the clip's frames last is known only once they are read: see :func:`cut_to`.
    """
    if not clip.info.audio:
        return None
    rest = (clip.info.duration or Fraction(1 << 31)) - clip.start
    return AudioTrack(clip.path, clip.start, min(rest, clip.duration or rest), clip.info.origin)


def cut_to(audio: AudioTrack | Waveform | None, duration: Fraction) -> AudioTrack | Waveform | None:
    """Audio that lasts no longer than the pictures."""
    if isinstance(audio, AudioTrack):
        return replace(audio, duration=min(audio.duration, duration))
    if isinstance(audio, Waveform):
        return Waveform(audio.samples[:, : round(duration * audio.rate)], audio.rate)
    return None


@dataclass
class AudioPieces:
    """Audio as it is decoded: ``rate`` in Hz, channel count, and float32 ``[channels, n]`` pieces in order."""

    rate: int
    channels: int
    pieces: Iterator[np.ndarray]


@contextmanager
def open_audio(audio: AudioTrack | Waveform) -> Iterator[AudioPieces]:
    """Audio piece by piece, sample-exact: silence stands in for samples missing before a stream's first.

    Raises InputError when the file has no audio.
    """
    if isinstance(audio, Waveform):
        begins = range(0, audio.samples.shape[1], audio.rate)
        pieces = (np.ascontiguousarray(audio.samples[:, b : b + audio.rate], dtype=np.float32) for b in begins)
        yield AudioPieces(audio.rate, audio.samples.shape[0], pieces)
        return
    with open_input(audio.path) as container:
        if not container.streams.audio:
            raise InputError(f"{audio.path} has no audio")
        context = container.streams.audio[0].codec_context
        yield AudioPieces(context.sample_rate, context.channels, _pieces(container, audio))


def _pieces(container: av.container.InputContainer, track: AudioTrack) -> Iterator[np.ndarray]:
    stream = container.streams.audio[0]
    rate, begin = stream.codec_context.sample_rate, track.origin + track.start
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
                    yield np.zeros((samples.shape[0], min(position, wanted)), np.float32)
            first, last = max(0, -position), min(samples.shape[1], wanted - position)
            if last > first:
                yield np.ascontiguousarray(samples[:, first:last])
            position += samples.shape[1]
        if position is not None and position >= wanted:
            return


def read_waveform(audio: AudioTrack | Waveform) -> Waveform:
    """All of a span in memory. Raises InputError when the file has no audio."""
    with open_audio(audio) as opened:
        parts = list(opened.pieces)
        return Waveform(
            np.concatenate(parts, axis=1) if parts else np.zeros((opened.channels, 0), np.float32), opened.rate
        )


def _decoded(container: av.container.InputContainer, stream) -> Iterator[av.AudioFrame]:
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.FFmpegError:
            continue


def copied_packets(track: AudioTrack, out_stream) -> Iterator[av.Packet]:
    """Packets of a span, moved to begin at zero, for a stream of the same codec."""
    with open_input(track.path) as container:
        stream = container.streams.audio[0]
        begin = track.origin + track.start
        base = stream.time_base
        for packet in container.demux(stream):
            if packet.pts is None:
                continue
            middle = packet.pts * base - begin + (packet.duration or 0) * base / 2
            if middle < 0:
                continue
            if middle > track.duration:
                return
            packet.pts = max(0, packet.pts - round(begin / base))
            packet.dts = packet.pts
            packet.stream = out_stream
            yield packet
