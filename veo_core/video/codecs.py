"""The formats that can be written, a row each, and what sound they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import av

from ..errors import OutputError
from .audio import layout_of

Codec = Literal["h264", "h265", "vp9", "av1", "prores4444", "ffv1", "png", "png16", "gif", "webp"]
CODECS: tuple[Codec, ...] = get_args(Codec)
_MP4, _MP4_SOUND = (".mp4", ".mov", ".mkv"), ("aac", "mp3", "ac3", "eac3", "alac")


@dataclass(frozen=True)
class Row:
    """How a format is written.

    Attributes:
        encoder: FFmpeg's name. suffixes: of its containers, the usual one first; none for a folder of pictures.
        pixel_format: the usual one. deep: of 10 bits. alpha: with transparency. deep_alpha: with both.
        crf: the usual quality, and most: the worst. sides: the shortest that its encoder takes.
        joins: whether files can be joined by their packets.
        sound: codecs of sound that its container takes, the first that can be encoded is.
    """

    encoder: str
    suffixes: tuple[str, ...]
    pixel_format: str
    deep: str | None = None
    alpha: str | None = None
    deep_alpha: str | None = None
    crf: int | None = None
    most: int | None = None
    sides: int = 1
    joins: bool = True
    options: dict[str, str] = field(default_factory=dict)
    sound: tuple[str, ...] = ()


ROWS: dict[str, Row] = {
    "h264": Row(
        "libx264", _MP4, "yuv420p", "yuv420p10le", crf=18, most=51, options={"preset": "medium"}, sound=_MP4_SOUND
    ),
    "h265": Row(
        "libx265", _MP4, "yuv420p", "yuv420p10le", crf=22, most=51,
        options={"preset": "medium", "x265-params": "log-level=error"}, sound=_MP4_SOUND,
    ),
    "vp9": Row(
        "libvpx-vp9", (".webm", ".mkv"), "yuv420p", "yuv420p10le", "yuva420p", crf=30, most=63,
        options={"b": "0", "row-mt": "1"}, sound=("opus", "vorbis"),
    ),
    # Of a long side and one under 32, SVT-AV1 never finishes.
    "av1": Row(
        "libsvtav1", (".mp4", ".webm", ".mkv"), "yuv420p", "yuv420p10le", crf=30, most=63, sides=32,
        options={"preset": "8"}, sound=("opus",),
    ),
    "prores4444": Row(
        "prores_ks", (".mov",), "yuva444p10le", "yuva444p10le", "yuva444p10le", "yuva444p10le",
        options={"profile": "4444", "alpha_bits": "16"}, sound=("pcm_s16le", "aac"),
    ),
    "ffv1": Row(
        "ffv1", (".mkv", ".nut"), "yuv444p", "yuv444p10le", "yuva444p", "yuva444p10le",
        options={"level": "3"}, sound=("flac", "aac", "opus", "pcm_s16le", "mp3"),
    ),
    "png": Row("png", ("",), "rgb24", None, "rgba", joins=False),
    "png16": Row("png", ("",), "rgb48be", None, "rgba64be", joins=False),
    "gif": Row("gif", (".gif",), "pal8", joins=False),
    "webp": Row("libwebp_anim", (".webp",), "yuv420p", None, "yuva420p", joins=False, options={"quality": "85"}),
}  # fmt: skip

_SOUND_ENCODERS = {"aac": "aac", "opus": "libopus", "flac": "flac", "pcm_s16le": "pcm_s16le", "vorbis": "libvorbis"}


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
        if self.codec not in ROWS:
            raise OutputError(f"codec = {self.codec} is unknown; give one of {', '.join(ROWS)}")
        top = self.row.most
        if self.crf is not None and (top is None or not 0 <= self.crf <= top):
            allowed = f"give 0 to {top}" if top else f"{self.codec} has none; leave it out"
            raise OutputError(f"crf = {self.crf} cannot be used with {self.codec}; {allowed}")
        if self.deep and self.row.deep is None:
            raise OutputError(f"deep: {self.codec} has no 10-bit form; choose h264, h265, vp9, av1, prores4444 or ffv1")
        if self.bitrate is not None and not (0 < self.bitrate < 1 << 40 and top):
            raise OutputError(
                f"bitrate = {self.bitrate} cannot be used with {self.codec}; give a positive number with h264, h265, vp9 or av1"
            )
        if self.bitrate is not None and self.crf is not None:
            raise OutputError(f"crf = {self.crf} and bitrate = {self.bitrate} exclude each other; give one of them")

    @property
    def row(self) -> Row:
        """How its codec is written."""
        return ROWS[self.codec]

    @property
    def is_folder(self) -> bool:
        """Whether a folder of pictures is written."""
        return self.suffix == ""

    @property
    def joins(self) -> bool:
        """Whether files of this codec can be joined by their packets."""
        return self.row.joins

    @property
    def suffix(self) -> str:
        """Usual file name ending; empty for a folder of pictures."""
        return self.row.suffixes[0]

    def keeps_alpha(self, alpha: bool) -> bool:
        """Whether transparency that is there is written."""
        return alpha and (self.row.deep_alpha if self.deep else self.row.alpha) is not None

    def pixel_format(self, alpha: bool) -> str:
        """FFmpeg's name of the pixels that are written."""
        row = self.row
        if self.keeps_alpha(alpha):
            return row.deep_alpha if self.deep else row.alpha
        return row.deep if self.deep else row.pixel_format

    def check_size(self, size: tuple[int, int]) -> None:
        """Raises OutputError for a width and height that the encoder does not take."""
        if min(size) < self.row.sides:
            raise OutputError(
                f"{self.codec} cannot write {size[0]}x{size[1]} frames: each side must be {self.row.sides} or more; "
                "choose another codec, or make the frames larger"
            )


def available_codecs() -> dict[str, bool]:
    """Every codec and whether this FFmpeg can write it."""
    return {codec: row.encoder in av.codecs_available for codec, row in ROWS.items()}


def sound_settings(row: Row, rate: int, layout: str) -> Iterator[tuple[str, int, str]]:
    """Encoders, rates in Hz and layouts to try for a sound, nearest to it first: FFmpeg tells only by trying."""
    name = _SOUND_ENCODERS[next(c for c in row.sound if _SOUND_ENCODERS.get(c) in av.codecs_available)]
    known = av.Codec(name, "w").audio_rates
    rate = min(known, key=lambda r: (r < rate, abs(r - rate))) if known else rate
    channels = av.AudioLayout(layout).nb_channels
    layouts = dict.fromkeys((layout, layout_of(channels), "7.1", "5.1", "stereo", "mono"))
    rates = dict.fromkeys((rate, 48000))
    for chosen in rates:
        yield from ((name, chosen, own) for own in layouts if av.AudioLayout(own).nb_channels <= channels)
