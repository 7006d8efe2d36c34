"""Colour: decoded frames to RGB in 0..1 and back, exactly; high dynamic range to standard.

FFmpeg's own YUV to RGB conversion loses up to four codes per pass at 8 bits by default, and its white is 0.4 % dark
at 16. Here it only changes chroma sampling and bit depth (to and from yuv444p16le); the matrix is applied in float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import av
import numpy as np
import torch
from av.video.reformatter import Interpolation, VideoReformatter
from torch import Tensor

from ..transfer import staged

SWS_FLAGS = int(Interpolation.BICUBIC) | 0x40000 | 0x2000  # SWS_ACCURATE_RND, SWS_FULL_CHR_H_INT

# Kr and Kb of ITU-T H.273, table 4, by matrix_coefficients.
_LUMA = {
    1: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
    10: (0.2627, 0.0593),
}
BT709, BT601, UNSPECIFIED = 1, 6, 2
YCGCO = 8
# Of these FFmpeg knows the equations too; with another it would convert nothing.
_SWSCALE = (1, 2, 4, 5, 6, 7, 9, 10)
_UNREAD = {
    11: "YDzDx",
    13: "constant luminance by primaries",
    14: "ICtCp",
    15: "IPT-C2",
    16: "YCgCo-Re",
    17: "YCgCo-Ro",
}
PQ, HLG = 16, 18
FULL_RANGE = 2


_own = threading.local()


def reformat(frame: av.VideoFrame, **settings: object) -> av.VideoFrame:
    """``frame.reformat`` that may run on several threads for one frame, each with FFmpeg's tables made once."""
    if not hasattr(_own, "reformatter"):
        _own.reformatter = VideoReformatter()
    return _own.reformatter.reformat(frame, **settings)


@dataclass(frozen=True)
class ColorTags:
    """Colour description in the code points of ITU-T H.273; 2 is unspecified.

    Attributes:
        matrix: matrix_coefficients, resolved: never unspecified.
        primaries, transfer: as tagged.
        full: full range instead of limited.
    """

    matrix: int = BT709
    primaries: int = UNSPECIFIED
    transfer: int = UNSPECIFIED
    full: bool = False

    @property
    def hdr(self) -> bool:
        """Whether the transfer function is PQ or HLG."""
        return self.transfer in (PQ, HLG)


def read_tags(frame: av.VideoFrame) -> ColorTags:
    """What a decoded frame says of its colours. Untagged YUV is BT.601 below 720 lines, else BT.709, as in players.

    A matrix that FFmpeg does not convert is taken off the frame: :func:`to_rgb` applies it.

    Raises ValueError that names a matrix which is not read.
    """
    matrix = int(frame.colorspace)
    if matrix in _UNREAD and not is_rgb(frame):
        raise ValueError(f"its colours are {_UNREAD[matrix]}, which is not read; convert it to BT.709 first")
    if matrix not in _SWSCALE:
        frame.colorspace = UNSPECIFIED
    if matrix not in _LUMA and matrix != YCGCO:
        matrix = BT709 if frame.height >= 720 or frame.width >= 1280 else BT601
    full = int(frame.color_range) == FULL_RANGE or frame.format.name.startswith("yuvj")
    return ColorTags(matrix, int(frame.color_primaries), int(frame.color_trc), full)


def is_rgb(frame: av.VideoFrame) -> bool:
    """Whether a frame's pixels are RGB, grey or of a palette."""
    name = frame.format.name
    return frame.format.is_rgb or name.startswith(("pal8", "mono")) or frame.format.has_palette


def has_alpha(format_name: str) -> bool:
    """Whether a pixel format carries transparency."""
    return format_name.startswith(("yuva", "rgba", "bgra", "argb", "abgr", "gbrap", "ya8", "ya16", "pal8"))


def to_rgb(frame: av.VideoFrame, tags: ColorTags) -> tuple[np.ndarray, np.ndarray | None]:
    """Decoded frame to RGB.

    Returns:
        float32 ``[3, H, W]`` in 0..1, still in the frame's own transfer and primaries; and alpha ``[1, H, W]`` or None.
    """
    alpha = has_alpha(frame.format.name)
    if is_rgb(frame):
        deep = max(c.bits for c in frame.format.components) > 8
        if deep:
            pixels, top = reformat(frame, format="rgba64le" if alpha else "rgb48le").to_ndarray(), 65535.0
        else:
            pixels, top = reformat(frame, format="rgba" if alpha else "rgb24").to_ndarray(), 255.0
        planes = np.moveaxis(pixels.astype(np.float32), -1, 0) / top
        return planes[:3], planes[3:] if alpha else None
    codes = Codes.of(frame, tags)
    planes = codes.planes.astype(np.float32)
    return np.clip(np.stack(codes.matrixed(planes)), 0, 1), planes[3:] / codes.top if alpha else None


@dataclass(frozen=True)
class Codes:
    """A YUV frame's codes at 16 bits, one a pixel: less to move than what they become.

    Attributes:
        planes: uint16 ``[3 or 4, H, W]``, transparency last.
        tags: their meaning. top: the largest code.
    """

    planes: np.ndarray
    tags: ColorTags
    top: float

    @classmethod
    def of(cls, frame: av.VideoFrame, tags: ColorTags) -> Codes:
        """Those of a decoded frame that is not RGB."""
        range_code = 2 if tags.full else 1
        name = "yuva444p16le" if has_alpha(frame.format.name) else "yuv444p16le"
        same = {"src_color_range": range_code, "dst_color_range": range_code}
        pixels = reformat(frame, format=name, interpolation=SWS_FLAGS, **same).to_ndarray()
        planes = np.moveaxis(pixels, -1, 0) if pixels.shape[-1] in (3, 4) else pixels
        depth = frame.format.components[0].bits
        return cls(planes, tags, float(((1 << depth) - 1) << (16 - depth)))

    def staged(self, device: torch.device) -> Callable[[], Tensor]:
        """What makes RGB float32 ``[3, H, W]`` in 0..1 on a device; the processor's work is done here."""
        codes = staged(torch.from_numpy(self.planes[:3].view(np.int16)), device)

        def rgb() -> Tensor:
            there = codes.to(device, non_blocking=True).int() & 0xFFFF
            return torch.stack(self.matrixed(there.float())).clamp(0, 1)

        return rgb

    def matrixed(self, planes: np.ndarray | Tensor) -> list:
        """R, G and B of these planes in float32, not clipped (ITU-T H.273, 8.3)."""
        if self.tags.full:
            y, (u, v) = planes[0] / self.top, ((p - 32768.0) / self.top for p in planes[1:3])
        else:
            y, (u, v) = (planes[0] - 4096.0) / 56064.0, ((p - 32768.0) / 57344.0 for p in planes[1:3])
        if self.tags.matrix == YCGCO:
            # ITU-T H.273, eq. 47 to 50: u is Cg, v is Co.
            return [y - u + v, y + u, y - u - v]
        kr, kb = _LUMA[self.tags.matrix]
        r, b = y + 2 * (1 - kr) * v, y + 2 * (1 - kb) * u
        return [r, (y - kr * r - kb * b) / (1 - kr - kb), b]


def from_rgb(rgb: np.ndarray, pixel_format: str, tags: ColorTags, alpha: np.ndarray | None = None) -> av.VideoFrame:
    """RGB to a frame for an encoder.

    Args:
        rgb: ``[3, H, W]`` in 0..1; values outside are clipped.
        pixel_format: of the encoder, YUV or RGB.
        alpha: ``[1, H, W]`` in 0..1, for formats that carry it; opaque when missing.
    """
    rgb = np.clip(rgb, 0, 1)
    with_alpha = has_alpha(pixel_format)
    planes = rgb if not with_alpha else np.concatenate([rgb, np.ones_like(rgb[:1]) if alpha is None else alpha])
    probe = av.VideoFormat(pixel_format)
    depth = max(c.bits for c in probe.components)
    if probe.is_rgb:
        if depth > 8:
            pixels, name = np.rint(planes * 65535).astype(np.uint16), "rgba64le" if with_alpha else "rgb48le"
        else:
            pixels, name = np.rint(planes * 255).astype(np.uint8), "rgba" if with_alpha else "rgb24"
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1)), format=name)
        return frame if name == pixel_format else reformat(frame, format=pixel_format, interpolation=SWS_FLAGS)
    codes = yuv_codes(planes[:3], depth, tags)
    if with_alpha:
        codes.append(planes[3] * ((1 << depth) - 1))
    # Rounded once, at the encoder's depth.
    return from_codes(np.clip(np.rint(np.stack(codes)), 0, (1 << depth) - 1).astype(np.uint16), pixel_format, tags)


def yuv_codes(rgb: np.ndarray | Tensor, depth: int, tags: ColorTags) -> list:
    """Y, Cb and Cr of ``rgb``, whose first axis is the colour, as unrounded codes of so many bits (ITU-T H.273, 8.3)."""
    kr, kb = _LUMA[tags.matrix]
    r, g, b = rgb
    y = kr * r + (1 - kr - kb) * g + kb * b
    u, v = (b - y) / (2 * (1 - kb)), (r - y) / (2 * (1 - kr))
    unit = float(1 << (depth - 8))
    if tags.full:
        top = (1 << depth) - 1
        return [y * top, u * top + 128 * unit, v * top + 128 * unit]
    return [(219 * y + 16) * unit, (224 * u + 128) * unit, (224 * v + 128) * unit]


def from_codes(codes: np.ndarray, pixel_format: str, tags: ColorTags) -> av.VideoFrame:
    """Codes ``[3 or 4, H, W]`` of a YUV format's depth, one a pixel, to a frame of that format."""
    depth = max(c.bits for c in av.VideoFormat(pixel_format).components)
    # In planes of the depth itself: swscale takes a fifth of the time that it takes from 16 bits, and rounds better.
    name = ("yuva444p" if len(codes) == 4 else "yuv444p") + ("" if depth == 8 else f"{depth}le")
    frame = av.VideoFrame(codes.shape[2], codes.shape[1], name)
    for plane, values in zip(frame.planes, codes, strict=True):
        rows = np.frombuffer(plane, np.uint8 if depth == 8 else np.dtype("<u2")).reshape(len(values), -1)
        rows[:, : values.shape[1]] = values
    range_code = 2 if tags.full else 1
    frame = reformat(
        frame, format=pixel_format, interpolation=SWS_FLAGS, src_color_range=range_code, dst_color_range=range_code
    )
    frame.colorspace, frame.color_range = tags.matrix, range_code
    return frame


def _pq_to_nits(x: np.ndarray) -> np.ndarray:
    """SMPTE ST 2084, eq. 4.1."""
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    p = np.power(x, 1 / m2)
    return 10000 * np.power(np.maximum(p - c1, 0) / (c2 - c3 * p), 1 / m1)


def _hlg_to_nits(x: np.ndarray, peak: float = 1000.0) -> np.ndarray:
    """ITU-R BT.2100, table 5: inverse OETF, then the OOTF of a 1,000 nit display (gamma 1.2)."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(x <= 0.5, x * x / 3, (np.exp((x - c) / a) + b) / 12)
    luma = np.tensordot(np.float32([0.2627, 0.6780, 0.0593]), scene, 1)
    return peak * np.power(np.maximum(luma, 1e-6), 0.2) * scene


_BT2020_TO_BT709 = np.float32(
    [[1.660491, -0.587641, -0.072850], [-0.124550, 1.132900, -0.008349], [-0.018151, -0.100579, 1.118730]]
)


def tone_map(rgb: np.ndarray, tags: ColorTags, white: float = 203.0) -> np.ndarray:
    """PQ or HLG in BT.2020 to BT.709 SDR, ``[3, H, W]`` in 0..1.

    Reference white (203 nits, ITU-R BT.2408) goes to 0.75 in linear light; above it, the largest channel is rolled off
    by ``x / (1 + x)`` shifted to meet it with equal slope, so that hue is kept.
    """
    nits = (_pq_to_nits if tags.transfer == PQ else _hlg_to_nits)(rgb.astype(np.float32))
    linear = np.tensordot(_BT2020_TO_BT709, nits, 1) / white
    top = np.maximum(linear.max(0, keepdims=True), 1e-6)
    knee = 0.75
    excess = np.maximum(top * knee - knee, 0) / (1 - knee)
    mapped = np.where(top <= 1, top * knee, knee + (1 - knee) * excess / (1 + excess))
    linear = np.clip(linear * (mapped / top), 0, 1)
    # The OETF of BT.709.
    return np.where(linear < 0.018, 4.5 * linear, 1.099 * np.power(np.maximum(linear, 1e-9), 0.45) - 0.099).astype(
        np.float32
    )
