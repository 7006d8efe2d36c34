"""Video out: frames to a file as they come, beside audio and metadata, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import struct
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import av.filter
import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, OutputError
from ..transfer import fetch
from .ahead import DEPTH, WORKERS
from .audio import AudioPieces, AudioTrack, Waveform, copied_packets, copies, cut_to, open_audio
from .codecs import OutputFormat, sound_settings
from .color import BT601, BT709, YCGCO, ColorTags, from_codes, from_rgb, has_alpha, yuv_codes
from .container import open_input

# What tells a picture that a writer made from others: a text chunk after the header of a PNG.
HEADER = 33
_TEXT = b"tEXtSoftware\0VeoStyle"
MARK = struct.pack(">I", len(_TEXT) - 4) + _TEXT + struct.pack(">I", zlib.crc32(_TEXT))
NAME_BYTES = 255
# Seconds of sound that settings are tried with.
TRIED = Fraction(1, 2)


class _Output:
    """A file in the making: it takes its name when it is whole, and leaves nothing behind when it fails."""

    def __init__(
        self,
        path: str | Path,
        output: OutputFormat | None,
        audio: AudioTrack | Waveform | None,
        metadata: dict[str, str] | None,
    ):
        # By its full path: a colon in a relative one would be read as a protocol.
        self.path, self.output = Path(path).absolute(), output or OutputFormat()
        self.audio, self.metadata = audio, metadata or {}
        check_writable(self.path, self.output)
        # Two threads may write the same name; names have a limit of 255 bytes.
        self.part = self.path.with_name(f".{uuid.uuid4().hex}.part{self.path.suffix}")
        self._container: av.container.OutputContainer | None = None
        self._held = contextlib.ExitStack()

    def __enter__(self):
        try:
            self._open()
        except (av.FFmpegError, OSError, ValueError, InputError) as e:
            self._discard()
            raise self._failure(e) from e
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
                # Hours may have passed since it was looked at.
                check_writable(self.path, self.output)
                earlier = self.path.with_name(f".{uuid.uuid4().hex}.old")
                if self.path.is_dir():
                    self.path.replace(earlier)
                self.part.replace(self.path)
                if earlier.is_dir():
                    _remove_pictures(earlier)
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
        sound = self.output.row.sound
        if self.audio is None or not sound:
            return
        if isinstance(self.audio, AudioTrack) and copies(self.audio, sound):
            with open_input(self.audio.path) as source:
                stream = next(a for a in source.streams.audio if self.audio.stream in (None, a.index))
                copied = self._container.add_stream_from_template(stream)
            self._audio_packets = copied_packets(self.audio, copied)
            return
        opened = self._held.enter_context(open_audio(self.audio))
        self._audio_packets = _encoded_packets(opened, self._add_sound(opened))

    def _add_sound(self, opened: AudioPieces) -> av.audio.stream.AudioStream:
        """A stream of the encoder, rate and layout nearest to a sound's that the encoder takes."""
        refused: Exception | None = None
        for name, rate, layout in sound_settings(self.output.row, opened.rate, opened.layout):
            try:
                # Tried apart: a container keeps every stream that was added to it.
                context = av.CodecContext.create(name, "w")
                context.sample_rate, context.layout = rate, layout
                context.format, context.time_base = context.codec.audio_formats[0], Fraction(1, rate)
                context.open()
            except (av.FFmpegError, ValueError) as e:
                refused = e
                continue
            return self._container.add_stream(name, rate=rate, layout=layout)
        raise refused

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
        with contextlib.suppress(OSError):
            if self.part.is_dir():
                _remove_pictures(self.part)
            else:
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
        self.output.check_size(size)
        self.alpha = self.output.keeps_alpha(alpha)
        self.pixel_format = self.output.pixel_format(alpha)
        self.count = 0
        # Pictures become the encoder's on several threads, and are encoded in their order on one.
        self._converting = ThreadPoolExecutor(WORKERS, "veostyle-convert")
        self._encoding = ThreadPoolExecutor(1, "veostyle-encode")
        self._jobs: deque[Future] = deque()
        self._palette: av.filter.Graph | None = None
        self._hundredth: int | None = None

    def _open(self) -> None:
        if self.output.is_folder:
            self.part.mkdir()
        else:
            super()._open()

    def _add_video(self) -> av.video.stream.VideoStream:
        row = self.output.row
        stream = self._container.add_stream(row.encoder, rate=self.rate)
        context = stream.codec_context
        width, height = self._even(*self.size)
        context.width, context.height, context.pix_fmt = width, height, self.pixel_format
        context.time_base = stream.time_base = self.time_base
        options = dict(row.options)
        if self.output.bitrate:
            context.bit_rate = self.output.bitrate
            options.pop("b", None)
        elif row.crf is not None:
            options["crf"] = str(self.output.crf if self.output.crf is not None else row.crf)
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
        on_device = self._codes(frames)
        arrived, pixels = fetch(frames.float() if on_device is None else on_device)
        masks = [None] * len(pixels) if alpha is None else alpha.detach().float().cpu().numpy()
        for image, mask, time in zip(pixels, masks, times, strict=True):
            pts = round(time / self.time_base)
            if self._palette:
                # GIF counts in hundredths of a second; of two frames in one of them the first is shown.
                if (hundredth := round(pts * self.time_base * 100)) == self._hundredth:
                    continue
                self._hundredth = hundredth
            self.count += 1
            made = self._converting.submit(self._converted, arrived, image, mask)
            self._jobs.append(self._encoding.submit(self._encode, made, self.count, pts))
            self._await(DEPTH)

    def _codes(self, frames: Tensor) -> Tensor | None:
        """Frames on a GPU as codes ``[n, 3, H, W]`` of the encoder's depth, which are smaller to fetch; None where the
        processor makes them."""
        form = av.VideoFormat(self.pixel_format)
        if frames.device.type == "cpu" or form.is_rgb or self._palette or self.alpha or has_alpha(self.pixel_format):
            return None
        depth = max(c.bits for c in form.components)
        codes = torch.stack(yuv_codes(frames.detach().float().clamp(0, 1).movedim(1, 0), depth, self.tags), 1)
        return codes.round().clamp(0, (1 << depth) - 1).to(torch.uint8 if depth == 8 else torch.int16)

    def _await(self, left: int) -> None:
        """Waits until so many pictures are left to encode, or one of them could not be."""
        try:
            while len(self._jobs) > left:
                self._jobs.popleft().result()
        except (av.FFmpegError, OSError) as e:
            raise self._failure(e) from e

    def _converted(self, arrived: Callable[[], None], image: np.ndarray, mask: np.ndarray | None) -> av.VideoFrame:
        arrived()
        if self.output.is_folder:
            return from_rgb(image, self.pixel_format, self.tags, mask)
        width, height = self._even(*self.size)
        pad = ((0, 0), (0, height - image.shape[1]), (0, width - image.shape[2]))
        if any(p for _, p in pad):
            image = np.pad(image, pad, mode="edge")
            mask = None if mask is None else np.pad(mask, pad, mode="edge")
        if image.dtype != np.float32:
            return from_codes(image, self.pixel_format, self.tags)
        return from_rgb(image, "rgb24" if self._palette else self.pixel_format, self.tags, mask)

    def _encode(self, made: Future, number: int, pts: int) -> None:
        frame = made.result()
        if self.output.is_folder:
            _save_png(frame, self.part / f"{number:06d}.png")
            return
        frame.pts, frame.time_base = pts, self.time_base
        if self._palette:
            self._palette.push(frame)
            frame = self._palette.pull()
            frame.pts, frame.time_base = pts, self.time_base
        self._container.mux(self._stream.encode(frame))
        self._mux_audio(pts * self.time_base)

    def _finish(self) -> None:
        self._await(0)
        if self.output.is_folder:
            return
        packets = self._stream.encode(None)
        if self.output.codec == "h265" and len(packets) == self.count:
            # x265 reckons decoding times from its third frame on; with fewer it reads memory that it never wrote.
            for packet, time in zip(packets, decode_times([p.pts for p in packets]), strict=True):
                packet.dts = time
        self._container.mux(packets)
        super()._finish()

    def _discard(self) -> None:
        for threads in (self._converting, self._encoding):
            threads.shutdown(cancel_futures=True)
        super()._discard()


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
    """Raises OutputError when a file of this name cannot be made, before any work is done.

    A file of that name will be replaced; a folder only where a writer made it and nothing was added since.
    """
    path = Path(path).absolute()
    if output.row.encoder not in av.codecs_available:
        raise OutputError(
            f"codec = {output.codec}: this FFmpeg has no {output.row.encoder}; `veostyle doctor` lists what it has"
        )
    if not output.is_folder and path.suffix.lower() not in output.row.suffixes:
        raise OutputError(
            f"{path}: {output.codec} cannot go into '{path.suffix}'; name it with {', '.join(output.row.suffixes)}"
        )
    if len(os.fsencode(path.name)) > NAME_BYTES:
        raise OutputError(f"{path}: its name is longer than {NAME_BYTES} bytes; give a shorter one")
    if path.is_dir():
        if not output.is_folder or path.is_symlink():
            raise OutputError(f"{path} is a folder; it is left as it is. Choose another name or output folder")
        if foreign := _foreign(path):
            raise OutputError(
                f"{path} is a folder with other files in it ({foreign}); choose another name for the folder of pictures"
            )
    elif output.is_folder and path.exists():
        raise OutputError(f"{path} is a file; choose another name for the folder of pictures")
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder; make it first or choose another")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder} is not writable; change its permissions or choose another folder")


def short_name(stem: str, ending: str) -> str:
    """``stem + ending``, the stem cut where the name would be longer than file systems allow, with room for a counter."""
    room = NAME_BYTES - 16 - len(os.fsencode(ending))
    return os.fsencode(stem)[:room].decode("utf-8", "ignore") + ending


def result_name(source: str, style: str, suffix: str) -> str:
    """What a result is called: after its source and its style, neither too long."""
    return short_name(source, f"_{os.fsencode(style)[:80].decode('utf-8', 'ignore')}{suffix}")


def _foreign(folder: Path) -> str | None:
    """A file in a folder of pictures that no writer made; None where there is none."""
    return next((p.name for p in sorted(folder.iterdir()) if not _is_own(p)), None)


def _is_own(path: Path) -> bool:
    """Whether a writer made a picture, which it says itself: nobody's files are taken for a result."""
    if not re.fullmatch(r"\d{6}\.png", path.name) or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(HEADER + len(MARK))[HEADER:] == MARK


def _remove_pictures(folder: Path) -> None:
    """Removes of a folder what a writer made; the folder stays where anything else is in it."""
    for path in folder.iterdir():
        if _is_own(path):
            path.unlink()
    folder.rmdir()


def decode_times(shown: list[int]) -> list[int]:
    """The latest ascending times, spaced as the pictures are, at which packets are decoded no later than they are shown.

    Args:
        shown: presentation times in the order of decoding.
    """
    ascending = sorted(shown)
    delay = max((a - b for a, b in zip(ascending, shown, strict=True)), default=0)
    return [time - delay for time in ascending]


def try_settings(
    path: Path,
    size: tuple[int, int],
    rate: Fraction,
    *,
    audio: AudioTrack | Waveform | None = None,
    **settings: object,
) -> None:
    """Writes a frame and the first of the sound with real encoders, beside ``path``, and removes it again.

    Arguments as of :class:`VideoWriter`. Raises OutputError for settings with which a whole run would fail at its end.
    """
    output = settings.get("output") or OutputFormat()
    check_writable(path, output)
    trial = Path(path).absolute().with_name(f".{uuid.uuid4().hex}{Path(path).suffix if output.suffix else ''}")
    try:
        with VideoWriter(trial, size, rate, audio=cut_to(audio, TRIED), **settings) as writer:
            alpha = torch.ones(1, 1, *size[::-1]) if settings.get("alpha") else None
            writer.write(torch.zeros(1, 3, *size[::-1]), [Fraction(0)], alpha)
    except OutputError as e:
        raise OutputError(str(e).replace(str(trial), str(path))) from e
    finally:
        if trial.is_dir():
            _remove_pictures(trial)
        else:
            trial.unlink(missing_ok=True)


def _sdr_tags(tags: ColorTags | None, size: tuple[int, int]) -> ColorTags:
    """Tags to write: those read, unless they were of high dynamic range, which has been mapped to BT.709."""
    if tags is None:
        return ColorTags(BT709 if size[1] >= 720 or size[0] >= 1280 else BT601)
    if tags.matrix == YCGCO:
        return ColorTags(BT709 if tags.primaries == 1 else BT601, tags.primaries, tags.transfer)
    return ColorTags(BT709, 1, 1) if tags.hdr else tags


def _encoded_packets(audio: AudioPieces, stream: av.audio.stream.AudioStream) -> Iterator[av.Packet]:
    context = stream.codec_context
    resampler = av.AudioResampler(context.format, context.layout, context.rate)
    position = 0
    for piece in audio.pieces:
        # Encoders of floats write what is louder than full scale, and some players wrap it.
        packed = np.ascontiguousarray(piece.clip(-1, 1).T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=audio.layout)
        frame.rate, frame.pts, frame.time_base = audio.rate, position, Fraction(1, audio.rate)
        position += piece.shape[1]
        for out in resampler.resample(frame):
            yield from stream.encode(out)
    for out in resampler.resample(None):
        yield from stream.encode(out)
    yield from stream.encode(None)


def _save_png(frame: av.VideoFrame, path: Path) -> None:
    context = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt, context.time_base = (
        frame.width,
        frame.height,
        frame.format.name,
        Fraction(1),
    )
    frame.pts = 0
    encoded = b"".join(bytes(p) for p in (*context.encode(frame), *context.encode(None)))
    path.write_bytes(encoded[:HEADER] + MARK + encoded[HEADER:])


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
