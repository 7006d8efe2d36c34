"""Stylised latents to a file, in segments, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import dropwhile, islice
from pathlib import Path

import torch
from torch import Tensor

from .cuda_graphs import CudaGraphs
from .engine import Stylizer
from .latents import StylizedLatents
from .motion.fusion import TemporalFusion
from .progress import Monitor, Progress, ignore
from .store import RunStore
from .video.audio import AudioTrack, Waveform, cut_to
from .video.codecs import OutputFormat
from .video.reader import Clip, Frame
from .video.writer import VideoWriter, join, tick, try_settings

SEGMENT = 48


def writer_settings(clip: Clip, output: OutputFormat) -> dict:
    """How a clip's result is written: arguments of :class:`~.video.writer.VideoWriter` but for path, times and sound."""
    return {
        "size": clip.size,
        "rate": clip.nominal_rate,
        "output": output,
        "tags": clip.info.tags,
        "alpha": output.keeps_alpha(clip.info.alpha),
    }


@torch.no_grad()
def render(
    engine: Stylizer,
    latents: StylizedLatents,
    path: Path,
    output: OutputFormat | None = None,
    *,
    audio: AudioTrack | Waveform | None = None,
    metadata: dict[str, str] | None = None,
    fusion: float | None = None,
    monitor: Monitor = ignore,
) -> Path:
    """Decodes latents and writes them with audio, metadata and, where the codec has it, the source's transparency.

    Codecs whose files can be joined are written in segments of 48 frames beside the latents; a segment that is whole
    is not made again. Segments are the same whether a run was interrupted or not, and so is the file.

    Args:
        path: of the video.
        audio: what goes beside the pictures, cut to their length.
        metadata: text tags, such as a workflow.
        fusion: how much frames are fused along the motion, 0..1; None is the run's own.

    Returns:
        ``path``.

    Raises:
        OutputError: as of :class:`~.video.writer.VideoWriter`, before the first frame where the settings are at fault;
            nothing is left under ``path``.
    """
    output = output or OutputFormat()
    fusion = latents.fusion if fusion is None else fusion
    clip, times = latents.clip, latents.survey.times
    audio = cut_to(audio, latents.survey.duration)
    settings = writer_settings(clip, output) | {"time_base": tick(list(times), 1 / clip.nominal_rate)}
    try_settings(path, audio=audio, metadata=metadata, **settings)
    graphs = CudaGraphs(latents.plan.graphs)
    if not output.joins:
        with (
            VideoWriter(path, audio=audio, metadata=metadata, **settings) as writer,
            closing(_Transparency(clip)) as alpha,
        ):
            _write(engine, latents, writer, 0, len(times), TemporalFusion(fusion), alpha, monitor, graphs)
        return path
    name, begins = _segment_name(output, fusion), range(0, len(times), SEGMENT)
    parts = [(latents.store.folder / f"{name}-{begin:08d}{output.suffix}", times[begin]) for begin in begins]
    missing = (begin for (part, _), begin in zip(parts, begins, strict=True) if not part.is_file())
    resumed = next(missing, len(times))

    def told(progress: Progress) -> None:
        monitor(replace(progress, resumed=resumed))

    _write_segments(engine, latents, name, [part for part, _ in parts], settings, fusion, told, graphs)
    join(parts, path, output, audio, metadata, lambda: told(Progress("decode", len(times), len(times))))
    return path


def _write(
    engine: Stylizer,
    latents: StylizedLatents,
    writer: VideoWriter,
    begin: int,
    end: int,
    fusion: TemporalFusion,
    alpha: _Transparency,
    monitor: Monitor,
    graphs: CudaGraphs,
) -> None:
    """Decodes frames ``begin`` to ``end`` into a writer, with the source's transparency where it is written."""
    times, done = latents.survey.times, begin
    with closing(engine.decode(latents, begin, end, fusion, monitor, graphs)) as chunks:
        for frames in chunks:
            stamps = [t - times[begin] for t in times[done : done + len(frames)]]
            writer.write(frames, stamps, alpha.of(done, len(frames)) if writer.alpha else None)
            done += len(frames)


class _Transparency:
    """The source's transparency, read once, forward."""

    def __init__(self, clip: Clip):
        self.clip = clip
        self._frames: Iterator[Frame] | None = None

    def of(self, first: int, count: int) -> Tensor:
        """``[count, 1, H, W]`` in 0..1 of frames from ``first`` on, which only ascends; 1 where a frame has none."""
        if self._frames is None:
            self._frames = self.clip.frames(first)
        wanted = islice(dropwhile(lambda f: f.index < first, self._frames), count)
        return torch.stack([torch.ones_like(f.image[:1]) if f.alpha is None else f.alpha for f in wanted])

    def close(self) -> None:
        """Closes the file."""
        if self._frames is not None:
            self._frames.close()


def _segment_name(output: OutputFormat, fusion: float) -> str:
    """Of a segment's file but for where it begins: what its pictures depend on beside the latents."""
    return f"segment-{output.codec}-{output.crf}-{output.bitrate}-{int(output.deep)}-{fusion:g}".replace(".", "_")


def _write_segments(
    engine: Stylizer,
    latents: StylizedLatents,
    name: str,
    parts: list[Path],
    settings: dict,
    amount: float,
    monitor: Monitor,
    graphs: CudaGraphs,
) -> None:
    """Makes the segments that are not there yet."""
    times, store = latents.survey.times, latents.store
    # A part is finished, its encoder's last frames and its file's index, while the next is decoded.
    with closing(_Transparency(latents.clip)) as alpha, ThreadPoolExecutor(1, "veostyle-finish") as finisher:
        finished: Future | None = None
        for begin, part in zip(range(0, len(times), SEGMENT), parts, strict=True):
            end = min(begin + SEGMENT, len(times))
            if part.is_file():
                monitor(Progress("decode", end, len(times)))
                continue
            saved = store.load_state(f"{name}-fused-{begin:08d}") if begin else None
            fusion = TemporalFusion(amount, None if saved is None else saved[0]["frame"].to(engine.backbone.device))
            with ExitStack() as opened:
                writer = opened.enter_context(VideoWriter(part, **settings))
                _write(engine, latents, writer, begin, end, fusion, alpha, monitor, graphs)
                store.save_state(f"{name}-fused-{end:08d}", {"frame": fusion.last})
                if finished is not None:
                    finished.result()
                finished = finisher.submit(_finish, opened.pop_all(), store, f"{name}-fused-{begin:08d}")
        if finished is not None:
            finished.result()


def _finish(opened: ExitStack, store: RunStore, state: str) -> None:
    """Closes a part, which is whole then, and forgets what it was begun with."""
    opened.close()
    store.drop_state(state)
