"""A clip written to a file for keeps: as it is where the codec stays, else encoded anew, frame by frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from .audio import AudioTrack, Waveform
from .reader import Clip
from .spill import SPILLED
from .writer import CODECS, OutputFormat, VideoWriter, check_writable, join, tick


def save_clip(
    clip: Clip,
    path: Path,
    output: OutputFormat,
    *,
    audio: AudioTrack | Waveform | None = None,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes a clip with audio and metadata; memory does not depend on its length.

    Args:
        output: codec and quality. Where the clip is a whole file of that codec, and no quality is named, its packets are
            copied.
        metadata: text tags, such as a workflow; an MP4 with ``workflow`` and ``prompt`` brings the graph back to ComfyUI.
        progress: told how many frames of how many are written; may raise to interrupt.

    Returns:
        ``path``.

    Raises:
        InputError, OutputError: as of reading and :class:`~.writer.VideoWriter`; nothing is left under ``path``.
    """
    check_writable(path, output)
    if output == OutputFormat(output.codec) == usual_format(clip) and _copyable(clip):
        join([(clip.path, clip.start)], path, output, audio, metadata)
        return path
    times = [time for time, _, _ in clip.thumbnails()]
    alpha = clip.info.alpha
    with VideoWriter(
        path,
        clip.size,
        clip.nominal_rate,
        time_base=tick(times, 1 / clip.nominal_rate),
        output=output,
        tags=clip.info.tags,
        alpha=alpha,
        audio=audio,
        metadata=metadata,
    ) as writer:
        for frame in clip.frames():
            progress(frame.index, len(times))
            writer.write(frame.image[None], [frame.time], None if frame.alpha is None else frame.alpha[None])
        progress(len(times), len(times))
    return path


def usual_format(clip: Clip) -> OutputFormat:
    """The format that a clip has where it can be written, else h264; that too for frames that came from memory."""
    own = {"hevc": "h265", "libdav1d": "av1", "prores": "prores4444"}.get(clip.info.codec, clip.info.codec)
    return OutputFormat(own if own in CODECS and clip.path.suffix not in (SPILLED, ".png", ".gif", ".webp") else "h264")


def _copyable(clip: Clip) -> bool:
    upright = not clip.info.rotation and not clip.info.mirrored and clip.info.pixel_aspect == 1
    described = (f for f in fields(Clip) if f.name not in ("path", "info"))
    return upright and clip.path.is_file() and all(getattr(clip, f.name) == f.default for f in described)
