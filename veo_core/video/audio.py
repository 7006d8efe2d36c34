"""Audio of a clip: found, cut to the clip's span, copied or encoded beside the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer

from ..errors import InputError
from .container import audio_streams, channel_names, open_input, seekable
from .reader import Clip

# Containers round time stamps to a millisecond, and encoders of old to a frame: what lies nearer follows on.
TOLERANCE = Fraction(1, 100)
# A decoder settles within so many seconds of where it begins.
LEAD = 1


@dataclass(frozen=True)
class AudioTrack:
    """A span of a file's sound, held as a description.

    Attributes:
        path: the file.
        start: seconds after the first picture.
        duration: seconds to take; shorter where the stream ends earlier.
        origin: time stamp of the first picture in the file, seconds.
        stream: index of the stream in the file; None is the one flagged as default, or the first.
        order: names of its channels, where the file has them in an order of its own.
    """

    path: Path
    start: Fraction
    duration: Fraction
    origin: Fraction = Fraction(0)
    stream: int | None = None
    order: tuple[str, ...] = ()


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
    track = clip.info.audio[0]
    rest = (clip.info.duration or Fraction(1 << 31)) - clip.start
    return AudioTrack(
        clip.path, clip.start, min(rest, clip.duration or rest), clip.info.origin, track.index, track.order
    )


def cut_to(audio: AudioTrack | Waveform | None, duration: Fraction) -> AudioTrack | Waveform | None:
    """Audio that lasts no longer than the pictures."""
    if isinstance(audio, AudioTrack):
        return replace(audio, duration=min(audio.duration, duration))
    if isinstance(audio, Waveform):
        return Waveform(audio.samples[:, : round(duration * audio.rate)], audio.rate)
    return None


@dataclass
class AudioPieces:
    """Audio as it is decoded: ``rate`` in Hz, layout, and float32 ``[channels, n]`` pieces in order, all finite."""

    rate: int
    layout: str
    pieces: Iterator[np.ndarray]

    @property
    def channels(self) -> int:
        """How many there are."""
        return av.AudioLayout(self.layout).nb_channels


@contextmanager
def open_audio(audio: AudioTrack | Waveform) -> Iterator[AudioPieces]:
    """Audio piece by piece, sample-exact: silence stands in for what is missing or no number.

    Rate and layout are those that a file's stream begins with, whatever it changes to.

    Raises InputError when the file has no audio that can be decoded.
    """
    if isinstance(audio, Waveform):
        begins = range(0, audio.samples.shape[1], audio.rate)
        pieces = (_finite(audio.samples[:, b : b + audio.rate]) for b in begins)
        yield AudioPieces(audio.rate, layout_of(audio.samples.shape[0]), pieces)
        return
    with open_input(audio.path) as container:
        stream = _stream(container, audio)
        layout = stream.codec_context.layout
        if not layout.nb_channels:
            raise InputError(f"{audio.path} does not say how many channels its sound has; convert it first")
        pieces = _pieces(container, stream, audio)
        if audio.order and set(audio.order) == set(channel_names(layout.name)):
            places = [audio.order.index(name) for name in channel_names(layout.name)]
            pieces = (np.ascontiguousarray(piece[places]) for piece in pieces)
        yield AudioPieces(stream.codec_context.sample_rate, _named(layout), pieces)


def layout_of(channels: int) -> str:
    """The usual layout of so many channels."""
    names = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
    return names.get(channels) or f"{channels}C"


def _named(layout: av.AudioLayout) -> str:
    """A layout's name; the usual one of as many channels where FFmpeg only counts them."""
    return layout_of(layout.nb_channels) if layout.name.endswith("channels") else layout.name


def _stream(container: InputContainer, track: AudioTrack) -> AudioStream:
    known = audio_streams(container)[0]
    found = next((a for a in known if track.stream in (None, a.index)), None)
    if found is None:
        raise InputError(f"{track.path} has no audio that can be decoded")
    return found


def _finite(samples: np.ndarray) -> np.ndarray:
    """Contiguous float32 in which what is no number is silence."""
    return np.nan_to_num(np.ascontiguousarray(samples, dtype=np.float32), copy=True, nan=0.0, posinf=0.0, neginf=0.0)


def _pieces(container: InputContainer, stream: AudioStream, track: AudioTrack) -> Iterator[np.ndarray]:
    """The span's samples in the rate and layout that the stream begins with; each frame stands where its stamp says."""
    rate, layout = stream.codec_context.sample_rate, _named(stream.codec_context.layout)
    wanted = round(track.duration * rate)
    position = 0
    for at, samples in _placed(container, stream, track, rate, layout):
        begin = max(0, at)
        if begin > position:
            for silent in range(position, min(begin, wanted), rate):
                yield np.zeros((samples.shape[0], min(rate, min(begin, wanted) - silent)), np.float32)
            position = min(begin, wanted)
        samples = samples[:, max(0, position - at) : max(0, wanted - at)]
        if samples.shape[1]:
            yield _finite(samples)
            position += samples.shape[1]
        if position >= wanted:
            return


def _placed(
    container: InputContainer, stream: AudioStream, track: AudioTrack, rate: int, layout: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Decoded samples, and where they begin in the span, in samples."""
    origin = track.origin + track.start
    tolerance, resampler, form, expected, shift = round(TOLERANCE * rate), None, None, None, 0
    for frame in _decoded(container, stream, origin):
        # A layout or rate that changes within the stream, as broadcasts do between programmes.
        if form != (form := (frame.format.name, frame.layout.name, frame.rate)):
            # Packed: PyAV looks beyond the planes of a frame that has eight.
            resampler = av.AudioResampler(format="flt", layout=layout, rate=rate)
        stamp = None if frame.pts is None else round((frame.pts * frame.time_base - origin) * rate) + shift
        if stamp is None:
            stamp = expected or 0
        elif expected is not None and stamp - expected <= tolerance:
            # What steps back a little follows on; by more, another piece begins, as the pictures' clock has it.
            shift += expected - stamp if stamp < expected - rate // 4 else 0
            stamp = expected
        # Layouts that FFmpeg only counts: those that swresample can mix.
        for out in resampler.resample(_labelled(frame)):
            samples = out.to_ndarray().reshape(out.samples, -1).T
            yield stamp, samples
            stamp += samples.shape[1]
        expected = stamp


def _labelled(frame: av.AudioFrame) -> av.AudioFrame:
    """A frame whose layout has a name."""
    if not frame.layout.name.endswith("channels"):
        return frame
    named = av.AudioFrame.from_ndarray(frame.to_ndarray(), frame.format.name, layout_of(frame.layout.nb_channels))
    named.rate, named.pts, named.time_base = frame.rate, frame.pts, frame.time_base
    return named


def read_waveform(audio: AudioTrack | Waveform) -> Waveform:
    """All of a span in memory. Raises InputError when the file has no audio."""
    with open_audio(audio) as opened:
        parts = list(opened.pieces)
        return Waveform(
            np.concatenate(parts, axis=1) if parts else np.zeros((opened.channels, 0), np.float32), opened.rate
        )


def _decoded(container: InputContainer, stream: AudioStream, begin: Fraction) -> Iterator[av.AudioFrame]:
    """Frames from a little before a time stamp on, where the container has an index; what is damaged is left out."""
    if begin > 2 * LEAD and seekable(container):
        try:
            container.seek(int((begin - LEAD) / stream.time_base), stream=stream, backward=True)
        except av.FFmpegError:
            container.seek(0)
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.FFmpegError:
            continue


def copies(track: AudioTrack, codecs: tuple[str, ...]) -> bool:
    """Whether a track's packets can be taken as they are: of one of these codecs, and without gaps or steps back."""
    with open_input(track.path) as container:
        stream = _stream(container, track)
        if stream.codec_context.name not in codecs or track.order:
            return False
        base = stream.time_base
        spans = [(p.pts * base, (p.duration or 0) * base) for p in _spanned(container, stream, track)]
    return all(abs(b - a - length) <= TOLERANCE for (a, length), (b, _) in pairwise(spans))


def _spanned(container: InputContainer, stream: AudioStream, track: AudioTrack) -> Iterator[av.Packet]:
    """The packets of a track's span."""
    begin = track.origin + track.start
    for packet in container.demux(stream):
        if packet.pts is None:
            continue
        middle = (packet.pts + (packet.duration or 0) / Fraction(2)) * stream.time_base - begin
        if middle > track.duration:
            return
        if middle >= 0:
            yield packet


def copied_packets(track: AudioTrack, out_stream) -> Iterator[av.Packet]:
    """Packets of a span, moved to begin at zero, for a stream of the same codec."""
    with open_input(track.path) as container:
        stream = _stream(container, track)
        begin = round((track.origin + track.start) / stream.time_base)
        for packet in _spanned(container, stream, track):
            packet.pts = max(0, packet.pts - begin)
            packet.dts = packet.pts
            packet.stream = out_stream
            yield packet
