"""Styles as people give them: pictures and their weights, before any model has read them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..video.pictures import open_picture, read_picture
from ..video.scenes import of_scene
from .prompts import Prompts, join_prompts

SHORT_SIDE = 512
MAX_PIXELS = 200_000_000


@dataclass(frozen=True)
class Style:
    """Style pictures, words, or both.

    Attributes:
        pictures: float32 ``[3, H, W]`` in 0..1 each, short side at most 512.
        weights: share of each, not negative, sum 1.
        weight: how strongly the style as a whole is applied; 0 is none, 1 as it is, more exaggerates.
        prompts: words, for models that read them.
        scenes: where the style changes along the clip, that of each scene in order; this one is the first of them, and
            scenes beyond them take the last.
    """

    pictures: tuple[Tensor, ...]
    weights: tuple[float, ...]
    weight: float = 1.0
    prompts: Prompts = field(default_factory=Prompts)
    scenes: tuple[Style, ...] = ()

    @property
    def by_scene(self) -> tuple[Style, ...]:
        """The style of each scene in order; those beyond take the last."""
        return self.scenes or (self,)

    @property
    def has_words(self) -> bool:
        """Whether any scene's style has words."""
        return any(bool(s.prompts or s.prompts.negative) for s in self.by_scene)

    def without_words(self) -> Style:
        """The same pictures alone."""
        scenes = tuple(s.without_words() for s in self.scenes)
        return replace(self, prompts=Prompts(), scenes=scenes)

    @property
    def digest(self) -> str:
        """Hash of pictures, weights and words."""
        hashed = hashlib.sha256(repr((self.weights, self.weight, self.prompts)).encode())
        for scene in self.scenes:
            hashed.update(scene.digest.encode())
        for picture in self.pictures:
            hashed.update(repr(tuple(picture.shape)).encode() + picture.mul(255).round().byte().numpy().tobytes())
        return hashed.hexdigest()


def style_from_tensors(
    pictures: list[Tensor],
    weights: list[float] | None = None,
    weight: float = 1.0,
    prompts: Prompts | None = None,
) -> Style:
    """A style from pictures in memory, words, or both.

    Args:
        pictures: float ``[3, H, W]`` in 0..1, any device.
        weights: how much each counts; equal when missing.
        weight: of the whole, 0 to 2.
        prompts: words.

    Raises:
        InputError: neither picture nor words, a side under 8 pixels, values that are not finite, weights that do not fit.
    """
    prompts = prompts or Prompts()
    if not pictures and not prompts:
        raise InputError("no style was given; give at least one style picture, or a style in words")
    weights = [1.0] * len(pictures) if weights is None else list(weights)
    if pictures and (len(weights) != len(pictures) or min(weights) < 0 or not 0 < sum(weights) < float("inf")):
        raise InputError(
            f"style weights = {weights} do not fit {len(pictures)} pictures; give one each, none negative, not all 0"
        )
    if not 0 <= weight <= 2:
        raise InputError(f"style weight = {weight} is out of range; give 0 to 2")
    kept = tuple(_prepared(p, f"style picture {i + 1}") for i, p in enumerate(pictures))
    return Style(kept, tuple(w / sum(weights) for w in weights), weight, prompts)


def _prepared(picture: Tensor, name: str) -> Tensor:
    picture = picture.detach().float().cpu()[:3]
    if picture.ndim != 3 or picture.shape[0] != 3 or min(picture.shape[1:]) < 8:
        raise InputError(f"{name} has shape {tuple(picture.shape)}; give colour pictures of at least 8x8 pixels")
    if not picture.isfinite().all():
        raise InputError(f"{name} holds values that are not finite; make it again")
    scale = SHORT_SIDE / min(picture.shape[1:])
    if scale < 1:
        size = [max(1, round(s * scale)) for s in picture.shape[1:]]
        picture = F.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]
    return picture.clamp(0, 1).contiguous()


def load_style(
    paths: list[str | Path], weights: list[float] | None = None, weight: float = 1.0, prompts: Prompts | None = None
) -> Style:
    """A style from picture files. Raises InputError that names the file that is missing, empty, damaged or too large."""
    return style_from_tensors([_load_picture(Path(p)) for p in paths], weights, weight, prompts)


def blend_styles(styles: list[Style], weights: list[float]) -> Style:
    """One style out of several: all their pictures, each weighing its share in its style times its style's weight.

    Words are joined, weighted where the shares differ. Styles that change by scene are blended scene by scene. Raises
    InputError when no style has any weight.
    """
    if len(styles) != len(weights) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise InputError(f"blend weights = {weights} do not fit {len(styles)} styles; none negative, not all 0")
    if any(s.scenes for s in styles):
        return blend_by_scene(styles, [weights])
    kept = [(s, w / sum(weights)) for s, w in zip(styles, weights, strict=True) if w]
    pictures = [p for s, _ in kept for p in s.pictures]
    shares = [share * v for s, share in kept for v in s.weights]
    total = sum(share for s, share in kept if s.pictures) or 1.0
    return Style(
        tuple(pictures),
        tuple(v / total for v in shares),
        sum(s.weight * share for s, share in kept),
        join_prompts([(s.prompts, share * len(kept)) for s, share in kept]),
    )


def blend_by_scene(styles: list[Style], weights: list[list[float]]) -> Style:
    """Styles in shares of their own in each scene.

    Args:
        weights: for each scene in order the weight of each style; scenes beyond them take the last.

    Raises:
        InputError: no scene, or weights that :func:`blend_styles` refuses.
    """
    if not weights:
        raise InputError("the shares of the scenes are empty; give at least one, such as 0, 0.5, 1")

    count = max(len(weights), *(len(s.by_scene) for s in styles))
    made = [blend_styles([of_scene(s.by_scene, i) for s in styles], of_scene(weights, i)) for i in range(count)]
    # Scenes beyond the last take it anyway.
    while len(made) > 1 and made[-1].digest == made[-2].digest:
        made.pop()
    return made[0] if len(made) == 1 else replace(made[0], scenes=tuple(made))


def parse_shares(text: str) -> list[float]:
    """Shares by scene, ``0, 0.5, 1``. Raises InputError for what is no number in 0..1."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError as e:
        raise InputError(f"scenes = {text!r}: give a share from 0 to 1 for each scene, such as 0, 0.5, 1") from e
    if not all(0 <= s <= 1 for s in shares):
        raise InputError(f"scenes = {text!r}: shares go from 0 to 1, such as 0, 0.5, 1")
    return shares


def _load_picture(path: Path) -> Tensor:
    name = f"style image {path}"
    with open_picture(path, name) as picture:
        width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InputError(f"{name} is {width}x{height} pixels, more than {MAX_PIXELS:,}; scale it down")
    pixels, alpha = read_picture(path, name, draft=2 * SHORT_SIDE)
    if alpha is not None:
        pixels = pixels * alpha + 1 - alpha
    return torch.from_numpy(pixels)


def cover(picture: Tensor, height: int, width: int) -> Tensor:
    """A picture ``[3, H, W]`` scaled and cut in its middle to fill a shape: ``[1, 3, height, width]``."""
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = [max(a, round(s * scale)) for a, s in zip((height, width), picture.shape[1:], strict=True)]
    picture = F.interpolate(picture[None], size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return picture[..., top : top + height, left : left + width]
