"""From stylised latents to a file, in segments, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction
from pathlib import Path

import torch

from .engine import Monitor, Progress, StylizedLatents, Stylizer, ignore
from .motion.fusion import TemporalFusion
from .video.audio import AudioTrack, Waveform, cut_to
from .video.writer import OutputFormat, VideoWriter, check_writable, join, tick

SEGMENT = 48


@torch.no_grad()
def render(
    engine: Stylizer,
    latents: StylizedLatents,
    path: Path,
    output: OutputFormat | None = None,
    *,
    audio: AudioTrack | Waveform | None = None,
    metadata: dict[str, str] | None = None,
    monitor: Monitor = ignore,
) -> Path:
    """Decodes latents and writes them with audio and metadata.

    Codecs whose files can be joined are written in segments of 48 frames beside the latents; a segment that is whole
    is not made again. Segments are the same whether a run was interrupted or not, and so is the file.

    Args:
        path: of the video.
        audio: what goes beside the pictures, cut to their length.
        metadata: text tags, such as a workflow.

    Returns:
        ``path``.

    Raises:
        OutputError: as of :class:`~.video.writer.VideoWriter`; nothing is left under ``path``.
    """
    output = output or OutputFormat()
    check_writable(path, output)
    clip, times = latents.clip, latents.survey.times
    audio = cut_to(audio, latents.survey.duration)
    settings = {
        "size": clip.size,
        "rate": clip.nominal_rate,
        "time_base": tick(list(times), 1 / clip.nominal_rate),
        "output": output,
        "tags": clip.info.tags,
    }
    if not output.joins:
        with (
            VideoWriter(path, audio=audio, metadata=metadata, **settings) as writer,
            closing(engine.decode(latents, monitor=monitor)) as chunks,
        ):
            done = 0
            for frames in chunks:
                writer.write(frames, times[done : done + len(frames)])
                done += len(frames)
        return path
    parts = _segments(engine, latents, settings, monitor)
    join(parts, path, output, audio, metadata, lambda: monitor(Progress("decode", len(times), len(times))))
    return path


def _segments(
    engine: Stylizer, latents: StylizedLatents, settings: dict, monitor: Monitor
) -> list[tuple[Path, Fraction]]:
    times, store, output = latents.survey.times, latents.store, settings["output"]
    name = f"segment-{output.codec}-{output.crf}-{output.bitrate}-{int(output.deep)}"
    begins = range(0, len(times), SEGMENT)
    parts = [(store.folder / f"{name}-{begin:08d}{output.suffix}", times[begin]) for begin in begins]
    for (part, origin), begin in zip(parts, begins, strict=True):
        end = min(begin + SEGMENT, len(times))
        if part.is_file():
            monitor(Progress("decode", end, len(times)))
            continue
        saved = store.load_state(f"{name}-fused-{begin:08d}") if begin else None
        fusion = TemporalFusion(None if saved is None else saved[0]["frame"].to(engine.backbone.device))
        with (
            VideoWriter(part, **settings) as writer,
            closing(engine.decode(latents, begin, end, fusion, monitor)) as chunks,
        ):
            done = begin
            for frames in chunks:
                writer.write(frames, [t - origin for t in times[done : done + len(frames)]])
                done += len(frames)
            store.save_state(f"{name}-fused-{end:08d}", {"frame": fusion.last})
        store.drop_state(f"{name}-fused-{begin:08d}")
    return parts
