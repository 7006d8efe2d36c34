"""Source and result in one picture: beside each other, above each other, or under a moving split."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import InputError
from ..progress import Monitor, Progress, ignore
from .audio import AudioTrack, Waveform, cut_to
from .codecs import OutputFormat
from .reader import Clip
from .save import timed
from .writer import VideoWriter, tick

Layout = Literal["split", "side_by_side", "stacked"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
SWEEP = 4
LINE = 2


def compare(
    source: Clip,
    result: Clip,
    path: Path,
    layout: Layout = "split",
    output: OutputFormat | None = None,
    audio: AudioTrack | Waveform | None = None,
    monitor: Monitor = ignore,
) -> Path:
    """Writes a video that shows both, frame by frame, with the result's times.

    Args:
        source: scaled to the result's size, cropped or padded as it is. result: as many frames as the source has.
        layout: ``split`` shows the source left of a line that sweeps over the picture and back in 4 seconds.
        monitor: told before each frame; may raise to interrupt.

    Raises:
        InputError: the two have different numbers of frames.
        OutputError: as of :class:`~.writer.VideoWriter`; nothing is left under ``path``.
    """
    times = timed(result, "compare", monitor)
    count, total = len(timed(source, "compare", monitor)) - 1, len(times) - 1
    if count != total:
        raise InputError(
            f"source has {count} frames and video {total}; give as source the clip that the video was made from"
        )
    width, height = result.size
    source = source.scaled(width, height)
    size = {"split": (width, height), "side_by_side": (2 * width, height), "stacked": (width, 2 * height)}[layout]
    with VideoWriter(
        path,
        size,
        result.nominal_rate,
        time_base=tick(times[:-1], 1 / result.nominal_rate),
        output=output,
        tags=result.info.tags,
        audio=cut_to(audio, times[-1]),
    ) as writer:
        for before, after in zip(source.frames(), result.frames(), strict=True):
            monitor(Progress("compare", after.index, total))
            writer.write(joined(before.image, after.image, layout, after.time)[None], [after.time])
        monitor(Progress("compare", total, total))
    return path


def joined(before: Tensor, after: Tensor, layout: Layout, time: Fraction) -> Tensor:
    """Two pictures ``[3, H, W]`` as one.

    Args:
        time: seconds; where the split stands.
    """
    if layout != "split":
        return torch.cat([before, after], dim=2 if layout == "side_by_side" else 1)
    width = after.shape[-1]
    place = round(width * (0.5 - 0.5 * math.cos(2 * math.pi * float(time) / SWEEP)))
    out = after.clone()
    out[..., :place] = before[..., :place]
    out[..., max(0, place - LINE // 2) : place + LINE // 2] = 1
    return out
