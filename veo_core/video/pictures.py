"""Picture files to RGB in 0..1: upright, in sRGB, at whatever depth they have."""

from __future__ import annotations

import struct
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageCms, ImageOps

from ..errors import InputError
from .color import read_tags, to_rgb

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".avif"})
_PNG = b"\x89PNG\r\n\x1a\n"
# Orientation and the like of older programs; other texts of a PNG say nothing of the picture.
_KEPT_TEXTS = (b"Raw profile type ", b"XML:com.adobe.xmp")


def open_picture(path: Path, name: str = "") -> Image.Image:
    """A picture file, opened and not yet decoded.

    Args:
        name: what to call it in messages; the path where missing.

    Raises:
        InputError: it is missing, empty, damaged, too large, or no picture.
    """
    name = name or str(path)
    if not path.is_file():
        raise InputError(f"{name} does not exist; give the path of a picture")
    if path.stat().st_size == 0:
        raise InputError(f"{name} is empty (0 bytes); export or download it again")
    try:
        return Image.open(_without_texts(path))
    except Exception as e:
        raise unreadable(name, e) from e


def unreadable(name: str, error: Exception) -> InputError:
    """What to raise for whatever a picture's decoder raised."""
    if isinstance(error, Image.DecompressionBombError):
        return InputError(f"{name} is too large a picture ({error}); scale it down")
    return InputError(f"{name} is not a picture that can be read ({error}); give a PNG, JPEG, TIFF or WebP")


def _without_texts(path: Path) -> Path | BytesIO:
    """A PNG less its text chunks, whose size Pillow limits: programs keep whole workflows there."""
    with path.open("rb") as file:
        if file.read(8) != _PNG:
            return path
        kept, dropped = [_PNG], False
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind not in (b"tEXt", b"zTXt", b"iTXt"):
                kept += [head, file.read(length + 4)]
            elif (body := file.read(length + 4)).startswith(_KEPT_TEXTS):
                kept += [head, body]
            else:
                dropped = True
    return BytesIO(b"".join(kept)) if dropped else path


def pixels_of(picture: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    """An opened picture, or one image of it, upright.

    Returns:
        float32 ``[3, H, W]`` in 0..1 in sRGB by its ICC profile, and alpha ``[1, H, W]`` or None.
    """
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(("I", "F")):
        grey = _levels(picture)
        return np.repeat(grey[None], 3, axis=0), None
    alpha = None
    if picture.has_transparency_data:
        alpha = np.array(picture.convert("RGBA").getchannel("A"), dtype=np.float32)[None] / 255
    rgb = np.array(_in_srgb(picture), dtype=np.float32) / 255
    return np.ascontiguousarray(np.moveaxis(rgb, -1, 0)), alpha


def _levels(picture: Image.Image) -> np.ndarray:
    """Grey of more than 8 bits, integers or floats, as 0..1 by the range that its numbers are of."""
    values = np.nan_to_num(np.array(picture, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    bits = picture.tag_v2.get(258, (0,))[0] if hasattr(picture, "tag_v2") else 0
    if picture.mode == "F":
        ranges = (1.0, 255.0, 65535.0)
    else:
        if bits == 32:
            # Pillow reads unsigned numbers as signed ones.
            values = np.where(values < 0, values + 2.0**32, values)
        ranges = (65535.0, 2.0**32 - 1)
    most = values.max(initial=0.0)
    top = next((r for r in ranges if most <= r), most)
    return np.clip(values / top, 0, 1).astype(np.float32)


def _in_srgb(picture: Image.Image) -> Image.Image:
    """As RGB, converted from its profile by littleCMS where it has one that fits."""
    profile = picture.info.get("icc_profile")
    plain = picture if picture.mode in ("RGB", "L", "CMYK", "LAB") else picture.convert("RGB")
    if profile:
        try:
            own = ImageCms.ImageCmsProfile(BytesIO(profile))
            if "sRGB" not in ImageCms.getProfileDescription(own):
                srgb = ImageCms.createProfile("sRGB")
                return ImageCms.profileToProfile(
                    plain, own, srgb, ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB",
                    flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
                )  # fmt: skip
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            # A profile that is damaged or of another kind of picture: as programs without colour management show it.
            return plain.convert("RGB")
    return plain.convert("RGB")


def is_deep_png(path: Path) -> bool:
    """Whether a PNG has 16 bits of colour, of which Pillow would keep 8: its header's bit depth and colour type."""
    with path.open("rb") as file:
        head = file.read(26)
    return head[:4] == b"\x89PNG" and head[24:25] == b"\x10" and head[25:26] in (b"\x02", b"\x06")


def deep_pixels(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """A PNG of 16 bits a colour; as :func:`pixels_of`. Raises InputError where it is damaged."""
    try:
        with av.open(BytesIO(path.read_bytes()), format="png_pipe") as container:
            frame = next(container.decode(video=0))
        return to_rgb(frame, read_tags(frame))
    except (av.FFmpegError, StopIteration, ValueError) as e:
        raise unreadable(str(path), e) from e


def read_picture(path: Path, name: str = "", draft: int | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """A whole picture file; as :func:`pixels_of`.

    Args:
        name: what to call it in messages. draft: a JPEG may be read at any size whose sides are not below this.

    Raises:
        InputError: as :func:`open_picture`.
    """
    with open_picture(path, name) as picture:
        if is_deep_png(path) and "icc_profile" not in picture.info:
            return deep_pixels(path)
        try:
            if draft:
                picture.draft("RGB", (draft, draft))
            return pixels_of(picture)
        except Exception as e:
            raise unreadable(name or str(path), e) from e
