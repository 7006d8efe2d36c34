"""A clip written to a file for keeps: as it is where the codec stays, else encoded anew, frame by frame."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from itertools import islice
from pathlib import Path

from ..progress import Monitor, Progress, ignore
from .audio import AudioTrack, Waveform, cut_to
from .codecs import CODECS, OutputFormat
from .container import open_input
from .reader import Clip
from .spill import SPILLED
from .writer import VideoWriter, check_writable, join, tick

# Matroska has no decoding times for the first packets of a stream whose pictures are reordered.
LOOKED_AT = 64


def save_clip(
    clip: Clip,
    path: Path,
    output: OutputFormat,
    *,
    audio: AudioTrack | Waveform | None = None,
    metadata: dict[str, str] | None = None,
    monitor: Monitor = ignore,
) -> Path:
    """Writes a clip with audio and metadata; memory does not depend on its length.

    Args:
        output: codec and quality. Where the clip is a whole file of that codec, and no quality is named, its packets are
            copied.
        metadata: text tags, such as a workflow; an MP4 with ``workflow`` and ``prompt`` brings the graph back to ComfyUI.
        monitor: told before each frame; may raise to interrupt.

    Returns:
        ``path``.

    Raises:
        InputError, OutputError: as of reading and :class:`~.writer.VideoWriter`; nothing is left under ``path``.
    """
    check_writable(path, output)
    if output == OutputFormat(output.codec) == usual_format(clip) and _copyable(clip):
        join([(clip.path, clip.start)], path, output, audio, metadata, lambda: monitor(Progress("save", 0)))
        return path
    times = timed(clip, "save", monitor)
    with VideoWriter(
        path,
        clip.size,
        clip.nominal_rate,
        time_base=tick(times[:-1], 1 / clip.nominal_rate),
        output=output,
        tags=clip.info.tags,
        alpha=clip.info.alpha,
        audio=cut_to(audio, times[-1]),
        metadata=metadata,
    ) as writer:
        for frame in clip.frames():
            monitor(Progress("save", frame.index, len(times) - 1))
            writer.write(frame.image[None], [frame.time], None if frame.alpha is None else frame.alpha[None])
        monitor(Progress("save", len(times) - 1, len(times) - 1))
    return path


def timed(clip: Clip, stage: str, monitor: Monitor) -> list[Fraction]:
    """Seconds from a clip's first frame to each of its frames, and to the end of the last.

    ``monitor`` is told the stage before each frame, without a count; it may raise to interrupt.
    """
    times, end = [], Fraction(0)
    for time, shown, _ in clip.thumbnails():
        monitor(Progress(stage, 0))
        times.append(time)
        end = time + shown
    return [*times, end]


def usual_format(clip: Clip) -> OutputFormat:
    """The format of a clip that is a video file of one that can be written, else h264; that too for frames from memory."""
    own = {"hevc": "h265", "prores": "prores4444"}.get(clip.info.codec, clip.info.codec)
    spilled = clip.path.suffix == SPILLED
    return OutputFormat(own) if own in CODECS and OutputFormat(own).joins and not spilled else OutputFormat("h264")


def _copyable(clip: Clip) -> bool:
    """Whether a file's packets can be taken as they are: whole, upright, from time 0, and each with its times."""
    plain = not clip.info.rotation and not clip.info.mirrored and clip.info.pixel_aspect == 1 and clip.info.origin == 0
    described = (f for f in fields(Clip) if f.name not in ("path", "info"))
    if not plain or not clip.path.is_file() or any(getattr(clip, f.name) != f.default for f in described):
        return False
    with open_input(clip.path) as container:
        packets = [p for p in islice(container.demux(container.streams.video[0]), LOOKED_AT) if p.size]
        return packets[0].is_keyframe and all(p.dts is not None and p.pts is not None for p in packets)
