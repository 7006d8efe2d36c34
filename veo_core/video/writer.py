"""Video out: frames to a file as they come, beside audio and metadata, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args

import av
import av.filter
import numpy as np
from torch import Tensor

from ..errors import OutputError
from .audio import AudioPieces, AudioTrack, Waveform, copied_packets, open_audio
from .color import BT601, BT709, ColorTags, from_rgb
from .container import open_input

Codec = Literal["h264", "h265", "vp9", "av1", "prores4444", "ffv1", "png", "png16", "gif", "webp"]
CODECS: tuple[Codec, ...] = get_args(Codec)


@dataclass(frozen=True)
class _Encoder:
    """How a format is written: encoder, containers (the first is the usual one), pixel format, the deeper one, crf."""

    name: str
    suffixes: tuple[str, ...]
    pixel_format: str
    deep_format: str | None = None
    alpha_format: str | None = None
    crf: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    audio: tuple[str, ...] = ()


_MP4_AUDIO = ("aac", "mp3", "ac3", "eac3", "alac")
_ENCODERS: dict[str, _Encoder] = {
    "h264": _Encoder(
        "libx264", (".mp4", ".mov", ".mkv"), "yuv420p", "yuv420p10le", None, 18, {"preset": "medium"}, _MP4_AUDIO
    ),
    "h265": _Encoder(
        "libx265",
        (".mp4", ".mov", ".mkv"),
        "yuv420p",
        "yuv420p10le",
        None,
        22,
        {"preset": "medium", "x265-params": "log-level=error"},
        _MP4_AUDIO,
    ),
    "vp9": _Encoder(
        "libvpx-vp9",
        (".webm", ".mkv"),
        "yuv420p",
        "yuv420p10le",
        "yuva420p",
        30,
        {"b": "0", "row-mt": "1"},
        ("opus", "vorbis"),
    ),
    "av1": _Encoder(
        "libsvtav1", (".mp4", ".webm", ".mkv"), "yuv420p", "yuv420p10le", None, 30, {"preset": "8"}, ("opus",)
    ),
    "prores4444": _Encoder(
        "prores_ks",
        (".mov",),
        "yuva444p10le",
        "yuva444p10le",
        "yuva444p10le",
        None,
        {"profile": "4444", "alpha_bits": "16"},
        ("pcm_s16le", "aac"),
    ),
    "ffv1": _Encoder(
        "ffv1",
        (".mkv", ".nut"),
        "yuv444p",
        "yuv444p10le",
        "yuva444p",
        None,
        {"level": "3"},
        ("flac", "aac", "opus", "pcm_s16le", "mp3"),
    ),
    "png": _Encoder("png", ("",), "rgb24", None, "rgba"),
    "png16": _Encoder("png", ("",), "rgb48be", None, "rgba64be"),
    "gif": _Encoder("gif", (".gif",), "pal8"),
    "webp": _Encoder("libwebp_anim", (".webp",), "yuv420p", None, "yuva420p", None, {"quality": "85"}),
}
_AUDIO_ENCODERS = {"aac": "aac", "opus": "libopus", "flac": "flac", "pcm_s16le": "pcm_s16le", "vorbis": "libvorbis"}
_CRF_MAX = {"h264": 51, "h265": 51, "vp9": 63, "av1": 63}


@dataclass(frozen=True)
class OutputFormat:
    """How to write a video.

    Attributes:
        codec: one of ``Codec``; ``png`` and ``png16`` write a folder of pictures.
        crf: quality where the codec has one, lower is better; None is the codec's usual.
        bitrate: bits per second in place of a quality.
        deep: 10 bits per component where the codec can.
    """

    codec: Codec = "h264"
    crf: int | None = None
    bitrate: int | None = None
    deep: bool = False

    def __post_init__(self) -> None:
        if self.codec not in _ENCODERS:
            raise OutputError(f"codec = {self.codec} is unknown; give one of {', '.join(_ENCODERS)}")
        top = _CRF_MAX.get(self.codec)
        if self.crf is not None and (top is None or not 0 <= self.crf <= top):
            allowed = f"give 0 to {top}" if top else f"{self.codec} has none; leave it out"
            raise OutputError(f"crf = {self.crf} cannot be used with {self.codec}; {allowed}")
        if self.deep and _ENCODERS[self.codec].deep_format is None:
            raise OutputError(f"deep: {self.codec} has no 10-bit form; choose h264, h265, vp9, av1, prores4444 or ffv1")
        if self.bitrate is not None and not (self.bitrate > 0 and self.codec in _CRF_MAX):
            raise OutputError(
                f"bitrate = {self.bitrate} cannot be used with {self.codec}; give a positive number with h264, h265, vp9 or av1"
            )
        if self.bitrate is not None and self.crf is not None:
            raise OutputError(f"crf = {self.crf} and bitrate = {self.bitrate} exclude each other; give one of them")

    @property
    def is_folder(self) -> bool:
        """Whether a folder of pictures is written."""
        return self.codec in ("png", "png16")

    @property
    def joins(self) -> bool:
        """Whether files of this codec can be joined by their packets."""
        return self.codec not in ("png", "png16", "gif", "webp")

    @property
    def suffix(self) -> str:
        """Usual file name ending; empty for a folder of pictures."""
        return _ENCODERS[self.codec].suffixes[0]


class _Output:
    """A file in the making: it takes its name when it is whole, and leaves nothing behind when it fails."""

    def __init__(
        self,
        path: str | Path,
        output: OutputFormat | None,
        audio: AudioTrack | Waveform | None,
        metadata: dict[str, str] | None,
    ):
        self.path, self.output = Path(path), output or OutputFormat()
        self.audio, self.metadata = audio, metadata or {}
        self.encoder = _ENCODERS[self.output.codec]
        check_writable(self.path, self.output)
        # Two threads may write the same name; names have a limit of 255 bytes.
        self.part = self.path.with_name(f".{uuid.uuid4().hex}.part{self.path.suffix}")
        self._container: av.container.OutputContainer | None = None
        self._held = contextlib.ExitStack()

    def __enter__(self):
        try:
            self._open()
        except (av.FFmpegError, OSError, ValueError) as e:
            self._discard()
            raise self._failure(e) from e
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
                if self.path.is_dir():
                    shutil.rmtree(self.path)
                self.part.replace(self.path)
        except (av.FFmpegError, OSError) as e:
            raise self._failure(e) from e
        finally:
            self._discard()

    def _open(self) -> None:
        options = {"movflags": "use_metadata_tags+faststart"} if self.part.suffix in (".mp4", ".mov") else {}
        if self.part.suffix == ".gif":
            options = {"loop": "0"}
        self._container = av.open(self.part, "w", options=options)
        self._container.metadata.update(self.metadata)
        self._stream = self._add_video()
        self._add_audio()

    def _add_video(self) -> av.video.stream.VideoStream:
        raise NotImplementedError

    def _add_audio(self) -> None:
        """Opens the audio; its packets are then muxed as the pictures' time passes."""
        self._audio_packets: Iterator[av.Packet] = iter(())
        self._next_audio: av.Packet | None = None
        if self.audio is None or not self.encoder.audio:
            return
        if isinstance(self.audio, AudioTrack):
            with open_input(self.audio.path) as source:
                if not source.streams.audio:
                    return
                stream = source.streams.audio[0]
                if stream.codec_context.name in self.encoder.audio:
                    self._audio_packets = copied_packets(self.audio, self._container.add_stream_from_template(stream))
                    return
        opened = self._held.enter_context(open_audio(self.audio))
        name = next(c for c in self.encoder.audio if c in _AUDIO_ENCODERS)
        rate = 48000 if name == "opus" else opened.rate
        stream = self._container.add_stream(_AUDIO_ENCODERS[name], rate=rate, layout=_layout(opened.channels))
        self._audio_packets = _encoded_packets(opened, stream)

    def _mux_audio(self, until: Fraction | None) -> None:
        """Muxes the audio packets before a time in seconds; all that are left for None."""
        while True:
            packet = self._next_audio = self._next_audio or next(self._audio_packets, None)
            if packet is None or (until is not None and packet.dts * packet.time_base > until):
                return
            self._container.mux(packet)
            self._next_audio = None

    def _finish(self) -> None:
        self._mux_audio(None)
        container, self._container = self._container, None
        container.close()

    def _discard(self) -> None:
        with contextlib.suppress(av.FFmpegError, OSError):
            self._held.close()
        if self._container is not None:
            container, self._container = self._container, None
            with contextlib.suppress(av.FFmpegError, OSError):
                container.close()
        if self.part.is_dir():
            shutil.rmtree(self.part, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                self.part.unlink(missing_ok=True)

    def _failure(self, error: Exception) -> OutputError:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.ENOSPC:
            reason = "the disk is full; free some space or choose another folder"
        return OutputError(f"{self.path} could not be written as {self.output.codec}: {reason}")


class VideoWriter(_Output):
    """Writes one file. A context manager: on a clean exit the file takes its name, on an error nothing is left.

    Args:
        path: file to make, with an ending that its codec can take; for PNG, a folder.
        size: width and height. Odd sizes are padded by one repeated line where the pixel format needs even ones.
        rate: frames per second; an average where times vary.
        time_base: unit of the time stamps; None is that of ``rate``.
        output: codec and quality.
        tags: colours to write; None is BT.601 or BT.709 by size. High dynamic range is written as BT.709.
        alpha: write transparency where the codec carries it.
        audio: what to put beside the pictures; copied where the container allows.
        metadata: text tags of the container, such as a workflow as JSON.

    Raises:
        OutputError: the folder is missing or not writable, the ending does not suit the codec, the encoder is absent
            or refuses the settings, the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        size: tuple[int, int],
        rate: Fraction,
        *,
        time_base: Fraction | None = None,
        output: OutputFormat | None = None,
        tags: ColorTags | None = None,
        alpha: bool = False,
        audio: AudioTrack | Waveform | None = None,
        metadata: dict[str, str] | None = None,
    ):
        super().__init__(path, output, audio, metadata)
        self.size, self.rate, self.time_base = size, rate, time_base or 1 / rate
        self.tags = ColorTags(BT601) if self.output.codec == "webp" else _sdr_tags(tags, size)
        self.pixel_format = self.encoder.pixel_format
        if self.output.deep:
            self.pixel_format = self.encoder.deep_format
        elif alpha and self.encoder.alpha_format:
            self.pixel_format = self.encoder.alpha_format
        self.count = 0
        self._palette: av.filter.Graph | None = None
        self._hundredth: int | None = None

    def _open(self) -> None:
        if self.output.is_folder:
            self.part.mkdir()
        else:
            super()._open()

    def _add_video(self) -> av.video.stream.VideoStream:
        stream = self._container.add_stream(self.encoder.name, rate=self.rate)
        context = stream.codec_context
        width, height = self._even(*self.size)
        context.width, context.height, context.pix_fmt = width, height, self.pixel_format
        context.time_base = stream.time_base = self.time_base
        options = dict(self.encoder.options)
        if self.output.bitrate:
            context.bit_rate = self.output.bitrate
            options.pop("b", None)
        elif self.encoder.crf is not None:
            options["crf"] = str(self.output.crf if self.output.crf is not None else self.encoder.crf)
        if self.output.codec == "h264" and min(self.size) < 144:
            # x264's lookahead reads memory it never wrote in frames this small: no two runs give the same bits.
            options["mbtree"] = "0"
        context.options = options
        if not av.VideoFormat(self.pixel_format).is_rgb and self.pixel_format != "pal8":
            context.colorspace, context.color_range = self.tags.matrix, 2 if self.tags.full else 1
            context.color_primaries, context.color_trc = self.tags.primaries, self.tags.transfer
        if self.output.codec == "gif":
            self._palette = _palette_graph(width, height, self.time_base)
        return stream

    def _even(self, width: int, height: int) -> tuple[int, int]:
        subsampled = av.VideoFormat(self.pixel_format).chroma_width(64) < 64
        return (width + width % 2, height + height % 2) if subsampled else (width, height)

    def write(self, frames: Tensor, times: Iterable[Fraction], alpha: Tensor | None = None) -> None:
        """Appends frames.

        Args:
            frames: float ``[n, 3, H, W]`` in 0..1, any device.
            times: seconds since the first frame, ascending, one each.
            alpha: ``[n, 1, H, W]`` in 0..1, for formats that carry it.
        """
        pixels = frames.detach().float().cpu().numpy()
        masks = [None] * len(pixels) if alpha is None else alpha.detach().float().cpu().numpy()
        for image, mask, time in zip(pixels, masks, times, strict=True):
            try:
                self._write_one(image, mask, round(time / self.time_base))
            except (av.FFmpegError, OSError) as e:
                raise self._failure(e) from e

    def _write_one(self, image: np.ndarray, mask: np.ndarray | None, pts: int) -> None:
        self.count += 1
        if self.output.is_folder:
            frame = from_rgb(image, self.pixel_format, self.tags, mask)
            _save_png(frame, self.part / f"{self.count:06d}.png")
            return
        if self._palette:
            # GIF counts in hundredths of a second; of two frames in one of them the first is shown.
            if (hundredth := round(pts * self.time_base * 100)) == self._hundredth:
                return
            self._hundredth = hundredth
        width, height = self._even(*self.size)
        pad = ((0, 0), (0, height - image.shape[1]), (0, width - image.shape[2]))
        if any(p for _, p in pad):
            image = np.pad(image, pad, mode="edge")
            mask = None if mask is None else np.pad(mask, pad, mode="edge")
        frame = from_rgb(image, "rgb24" if self._palette else self.pixel_format, self.tags, mask)
        frame.pts, frame.time_base = pts, self.time_base
        if self._palette:
            self._palette.push(frame)
            frame = self._palette.pull()
            frame.pts, frame.time_base = pts, self.time_base
        self._container.mux(self._stream.encode(frame))
        self._mux_audio(pts * self.time_base)

    def _finish(self) -> None:
        if self.output.is_folder:
            return
        self._container.mux(self._stream.encode(None))
        super()._finish()


class _Joined(_Output):
    """Takes its pictures from files that were written with the same settings, without encoding them again."""

    def __init__(self, parts: list[tuple[Path, Fraction]], before_packet: Callable[[], None], *args):
        super().__init__(*args)
        self.parts, self.before_packet = parts, before_packet

    def _add_video(self) -> av.video.stream.VideoStream:
        with av.open(self.parts[0][0]) as first:
            # Opaque: by the stream alone, without looking for an encoder of the decoder's name.
            return self._container.add_stream_from_template(first.streams.video[0], opaque=True)

    def _finish(self) -> None:
        last: int | None = None
        for path, offset in self.parts:
            with av.open(path) as part:
                stream = part.streams.video[0]
                shift = round(offset / stream.time_base)
                for packet in part.demux(stream):
                    self.before_packet()
                    if packet.dts is None:
                        continue
                    packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                    if last is not None and packet.dts <= last:
                        # A part begins with frames whose decoding times lie before its first picture.
                        packet.dts = min(last + 1, packet.pts)
                    last = packet.dts
                    packet.stream = self._stream
                    self._mux_audio(packet.dts * stream.time_base)
                    self._container.mux(packet)
        super()._finish()


def join(
    parts: list[tuple[Path, Fraction]],
    path: str | Path,
    output: OutputFormat,
    audio: AudioTrack | Waveform | None = None,
    metadata: dict[str, str] | None = None,
    before_packet: Callable[[], None] = lambda: None,
) -> None:
    """Makes one file of several that were written with the same settings, by copying their packets.

    Args:
        parts: files and the time in seconds at which each begins.
        before_packet: called before each; may raise to interrupt.

    Raises:
        OutputError: as of :class:`VideoWriter`.
    """
    with _Joined(parts, before_packet, path, output, audio, metadata):
        pass


def check_writable(path: Path, output: OutputFormat) -> None:
    """Raises OutputError when a file of this name cannot be made, before any work is done."""
    encoder = _ENCODERS[output.codec]
    try:
        av.Codec(encoder.name, "w")
    except (av.FFmpegError, ValueError) as e:
        raise OutputError(
            f"codec = {output.codec}: this FFmpeg has no {encoder.name}; `veostyle doctor` lists what it has"
        ) from e
    if output.is_folder:
        kept = [p.name for p in path.iterdir() if not re.fullmatch(r"\d{6}\.png", p.name)] if path.is_dir() else []
        if path.is_file() or kept:
            what = f"is a folder with other files in it ({kept[0]})" if kept else "is a file"
            raise OutputError(f"{path} {what}; choose another name for the folder of pictures")
    elif path.suffix.lower() not in encoder.suffixes:
        raise OutputError(
            f"{path}: {output.codec} cannot go into '{path.suffix}'; name it with {', '.join(encoder.suffixes)}"
        )
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder; make it first or choose another")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder} is not writable; change its permissions or choose another folder")


def _sdr_tags(tags: ColorTags | None, size: tuple[int, int]) -> ColorTags:
    """Tags to write: those read, unless they were of high dynamic range, which has been mapped to BT.709."""
    if tags is None:
        return ColorTags(BT709 if size[1] >= 720 or size[0] >= 1280 else BT601)
    return ColorTags(BT709, 1, 1) if tags.hdr else tags


def _encoded_packets(audio: AudioPieces, stream: av.audio.stream.AudioStream) -> Iterator[av.Packet]:
    context = stream.codec_context
    resampler = av.AudioResampler(context.format, context.layout, context.rate)
    position = 0
    for piece in audio.pieces:
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=_layout(audio.channels))
        frame.rate, frame.pts, frame.time_base = audio.rate, position, Fraction(1, audio.rate)
        position += piece.shape[1]
        for out in resampler.resample(frame):
            yield from stream.encode(out)
    for out in resampler.resample(None):
        yield from stream.encode(out)
    yield from stream.encode(None)


def _layout(channels: int) -> str:
    names = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
    return names.get(channels) or f"{channels}c"


def _save_png(frame: av.VideoFrame, path: Path) -> None:
    context = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt, context.time_base = (
        frame.width,
        frame.height,
        frame.format.name,
        Fraction(1),
    )
    frame.pts = 0
    path.write_bytes(b"".join(bytes(p) for p in (*context.encode(frame), *context.encode(None))))


def _palette_graph(width: int, height: int, time_base: Fraction) -> av.filter.Graph:
    """A palette for each frame: nothing is kept from one to the next."""
    graph = av.filter.Graph()
    source = graph.add_buffer(width=width, height=height, format="rgb24", time_base=time_base)
    split = graph.add("split")
    generate = graph.add("palettegen", "stats_mode=single:reserve_transparent=0")
    use = graph.add("paletteuse", "new=1:dither=sierra2_4a")
    sink = graph.add("buffersink")
    source.link_to(split)
    split.link_to(generate, 0, 0)
    split.link_to(use, 1, 0)
    generate.link_to(use, 0, 1)
    use.link_to(sink)
    graph.configure()
    return graph


def tick(times: list[Fraction], fallback: Fraction) -> Fraction:
    """A time base in which every time is a whole number, as coarse as can be but no finer than a microsecond.

    Args:
        times: seconds.
        fallback: used when there is at most one time.
    """
    denominator = 1
    for time in times:
        denominator = math.lcm(denominator, time.denominator)
        if denominator > 1_000_000:
            return Fraction(1, 90_000)
    return Fraction(1, denominator) if denominator > 1 or len(times) > 1 else fallback


def available_codecs() -> dict[str, bool]:
    """Every codec and whether this FFmpeg can write it."""
    out = {}
    for codec, encoder in _ENCODERS.items():
        try:
            av.Codec(encoder.name, "w")
            out[codec] = True
        except (av.FFmpegError, ValueError):
            out[codec] = False
    return out
