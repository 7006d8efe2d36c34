"""The pipeline, from a clip and a style to stylised frames."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .backbones.base import Backbone
from .cuda_graphs import CudaGraphs, fill
from .errors import InputError
from .latents import StylizedLatents
from .memory.plan import MemoryPlan, Policy, StagePeaks, make_plan, padded_size
from .motion.flow import STRIDE, FlowNet
from .motion.fusion import MOTION_CHANNELS, TemporalFusion, fuse
from .options import StylizeOptions
from .progress import Monitor, Progress, ignore
from .sampling.sampler import WindowJob
from .sampling.timeline import Timeline
from .sampling.windows import windows_of
from .store import RunStore
from .style.encoder import Style
from .transfer import put
from .video.reader import Clip
from .video.scenes import of_scene, survey
from .video.writer import short_name
from .window_feed import RunState, WindowFeed


class Stylizer:
    """Turns clips into a style with one backbone.

    Args:
        backbone: the model.
        flow: optical flow on the backbone's device.
    """

    def __init__(self, backbone: Backbone, flow: FlowNet):
        self.backbone, self.flow = backbone, flow
        self._traced: dict[tuple, dict] = {}

    def with_backbone(self, backbone: Backbone) -> Stylizer:
        """An engine for the same networks under another backbone, such as one with a LoRA; it knows their traces."""
        changed = Stylizer(backbone, self.flow)
        changed._traced = self._traced
        return changed

    def plan(
        self,
        clip: Clip,
        options: StylizeOptions,
        budget: int | None = None,
        policy: Policy = "fast",
        free: int | None = None,
    ) -> MemoryPlan:
        """Chunk sizes and predicted peaks; arguments as of :func:`~.memory.plan.make_plan`.

        Raises BudgetError when the budget (bytes) is too small for any.
        """
        options = options.for_backbone(self.backbone.defaults, self.backbone.reads)
        padded = padded_size(clip.size, self.backbone.multiple)
        # Tracing a large model takes seconds; it is the same for every clip of a size.
        other = {"seed": 0, "steps": 1, "denoise": 1.0, "overlap": 0, "min_scene": 1, "detector": "builtin"}
        key = (padded, self.backbone.device, options.model_copy(update=other).model_dump_json())
        peaks = StagePeaks(self.backbone, self.flow, padded, options, self._traced.setdefault(key, {}))
        return make_plan(peaks, clip.size, budget, policy, free)

    @torch.no_grad()
    def denoise(
        self,
        clip: Clip,
        style: Style,
        options: StylizeOptions,
        folder: Path,
        plan: MemoryPlan | None = None,
        monitor: Monitor = ignore,
    ) -> StylizedLatents:
        """Surveys a clip and stylises its latents, window by window, into a folder; goes on where an equal run stopped.

        Args:
            folder: a folder for runs; each has its own inside, named after what its result depends on.
            monitor: told before every chunk and step; what it raises ends the run, and what is done stays done.

        Raises:
            InputError, BudgetError, OutputError: before any long work, where that can be known.
        """
        options = options.for_backbone(self.backbone.defaults, self.backbone.reads)
        style, notices = self._readable(style, options)
        plan = plan or self.plan(clip, options)
        seen = survey(
            clip,
            detector=options.detector,
            min_length=options.min_scene,
            monitor=monitor,
        )
        timeline = Timeline(seen.scenes, self.backbone.time_factor)
        conditions = [self.backbone.condition(s, options, seen) for s in style.by_scene[: len(seen.scenes)]]
        store = self._open_store(clip, style, options, timeline, folder)
        try:
            self._denoise_into(store, clip, timeline, conditions, options, plan, monitor)
            store.flush()
        except BaseException:
            store.close()
            raise
        # At strength 0 a run is the plain model's; and what attends over time holds frames together by itself.
        fusion = 0.0 if options.strength == 0 or self.backbone.temporal else 1.0
        return StylizedLatents(store, clip, seen, plan, timeline, fusion, (*seen.notices, *notices))

    def _readable(self, style: Style, options: StylizeOptions) -> tuple[Style, list[str]]:
        """What the model reads of a style, and notices of what is of no use to it."""
        if "words" not in self.backbone.reads and style.has_words and style.pictures:
            return style.without_words(), [f"{self.backbone.name} reads pictures only: the style's words are not used"]
        if options.guidance > 1 and not self.backbone.guides(style):
            return style, [
                f"guidance = {options.guidance:g} is not used: it sets words against none, and the style has pictures "
                "alone; give a text, or an IP-Adapter"
            ]
        return style, []

    def _denoise_into(
        self,
        store: RunStore,
        clip: Clip,
        timeline: Timeline,
        conditions: list[Any],
        options: StylizeOptions,
        plan: MemoryPlan,
        monitor: Monitor,
    ) -> None:
        size = timeline.latents(options.window)
        stride = max(1, size - -(-options.overlap // timeline.factor))
        windows = windows_of(timeline.scenes, size, size - stride)
        total = timeline.frame_scenes[-1].end
        state = RunState.load(store, self.backbone.device)
        resumed = timeline.end_frame(windows[state.window - 1].end) if state.window else 0
        if state.window >= len(windows):
            monitor(Progress("denoise", total, total, resumed=resumed))
            return
        graphs = CudaGraphs(plan.graphs)
        with closing(
            WindowFeed(
                self.backbone, self.flow, clip, store, timeline, state, plan.encode_chunk, windows[state.window], graphs
            )
        ) as feed:
            for window in windows[state.window :]:
                first, scene = timeline.frame(window.start + window.shared), timeline.scene_of(window.start)
                content, motion = feed.advance(
                    window, lambda done: monitor(Progress("encode", done, total, resumed=resumed))
                )
                fresh = timeline.end_frame(window.end) - first

                def before_step(step: int, first: int = first, fresh: int = fresh) -> None:
                    monitor(Progress("denoise", first + step * fresh // options.steps, total, resumed=resumed))

                job = WindowJob(
                    window,
                    scene,
                    [timeline.frame(f) for f in (window.scene.anchor, *range(window.start, window.end))],
                    torch.cat([feed.anchor(window), content]),
                    motion,
                    stride,
                    options,
                    state.carried,
                    before_step,
                    graphs,
                )
                latents = self.backbone.sample(of_scene(conditions, scene), job)[1:]
                state.carried = job.left()
                store.write("latents", window.start, latents[: len(latents) - state.carried.overlap])
                state.window += 1
                feed.save(state, window)
                newest = latents[-1:]
                del job, content, motion
                monitor(
                    Progress(
                        "denoise",
                        timeline.end_frame(window.end),
                        total,
                        lambda z=newest: self._crop(self.backbone.decode(z), clip)[0],
                        resumed,
                    )
                )

    @torch.no_grad()
    def decode(
        self,
        latents: StylizedLatents,
        begin: int = 0,
        end: int | None = None,
        fusion: TemporalFusion | None = None,
        monitor: Monitor = ignore,
        graphs: CudaGraphs | None = None,
    ) -> Iterator[Tensor]:
        """Decodes frames ``begin`` to ``end`` and fuses them along their motion, chunk by chunk, in order.

        Args:
            fusion: holds the fused frame before ``begin``, and after each chunk the last one; None begins anew, by the
                run's own amount.
            graphs: of the calls before, for a run that is decoded in several; None begins anew.

        Yields:
            Frames ``[n, 3, H, W]`` in 0..1 at the clip's size on the backbone's device.
        """
        store, total = latents.store, latents.survey.frames
        maker = store.manifest["model"][0]
        if maker != self.backbone.name:
            raise InputError(f"latent was made by {maker}, and the model is {self.backbone.name}; give the same model")
        fusion, graphs = fusion or TemporalFusion(latents.fusion), graphs or CudaGraphs(latents.plan.graphs)
        end = total if end is None else end
        first = begin
        while first < end:
            monitor(Progress("decode", first, total))
            stop = first + latents.plan.decode_chunk
            count = min(stop if latents.timeline.factor == 1 else latents.timeline.group(first)[1], end) - first
            motion = put(store.read("motion", first, count), self.backbone.device)
            if latents.timeline.factor == 1:
                z = put(store.read("latents", first, count), self.backbone.device)
                shown = self._fused(z, motion, fusion, latents.plan.decode_chunk, graphs)
            else:
                shown = fusion(self._decoded_group(latents, first, first + count), motion)
            frames = self._crop(shown, latents.clip)
            newest = frames[-1].clone()
            # Only what the caller keeps outlives this chunk while the next one is decoded.
            del motion, shown
            yield frames
            del frames
            first += count
            monitor(Progress("decode", first, total, lambda: newest))  # noqa: B023

    def _fused(self, z: Tensor, motion: Tensor, fusion: TemporalFusion, chunk: int, graphs: CudaGraphs) -> Tensor:
        """Latents of single frames decoded and fused."""

        def decode(z: Tensor, motion: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            return fuse(self.backbone.decode(z), motion, last, fusion.amount)

        motion, last = fusion.given(motion, [side * self.backbone.factor for side in z.shape[-2:]])
        count = len(z)
        if graphs.enabled:
            z, motion = fill(z, chunk), fill(motion, chunk)
        shown, fused = graphs(("decode", fusion.amount), decode, z, motion, last)
        fusion.last = fused[count - 1 : count].clone()
        return shown[:count]

    def _decoded_group(self, latents: StylizedLatents, begin: int, end: int) -> Tensor:
        """Frames ``begin`` to ``end`` of one group of an autoencoder that groups them, as it gives them."""
        timeline, store = latents.timeline, latents.store
        start, stop = timeline.group(begin)
        first = timeline.context(timeline.latent(start))
        count = timeline.latent(stop - 1) + 1 - first
        frames = self.backbone.decode(store.read("latents", first, count).to(self.backbone.device))
        skipped = begin - (timeline.end_frame(first + 1) - 1)
        return frames[skipped : skipped + end - begin]

    def _crop(self, frames: Tensor, clip: Clip) -> Tensor:
        width, height = clip.size
        return frames[..., :height, :width].clamp(0, 1)

    def _open_store(
        self, clip: Clip, style: Style, options: StylizeOptions, timeline: Timeline, folder: Path
    ) -> RunStore:
        width, height = padded_size(clip.size, self.backbone.multiple)
        factor = self.backbone.factor
        manifest = {
            "source": source_identity(clip.path),
            "clip": {k: str(v) for k, v in vars(clip).items() if k not in ("info", "path")},
            "frames": timeline.frame_scenes[-1].end,
            "scenes": [[s.start, s.end, s.anchor] for s in timeline.frame_scenes],
            "style": style.digest,
            "model": [self.backbone.name, self.backbone.digest],
            "options": options.model_dump(),
        }
        key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
        return RunStore(
            folder / short_name(clip.path.stem, f"-{key}"),
            manifest,
            {
                "latents": (timeline.total, self.backbone.channels, height // factor, width // factor),
                "motion": (timeline.frame_scenes[-1].end, MOTION_CHANNELS, height // STRIDE, width // STRIDE),
            },
        )


def source_identity(path: Path) -> dict[str, Any]:
    """What tells one source file from another: size, time of change, and a hash of its two ends."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    hashed, size, changed = hashlib.sha256(), 0, 0
    for file in files:
        status = file.stat()
        size, changed = size + status.st_size, max(changed, status.st_mtime_ns)
        with file.open("rb") as stream:
            hashed.update(stream.read(1 << 20))
            stream.seek(max(0, status.st_size - (1 << 20)))
            hashed.update(stream.read(1 << 20))
    return {"path": str(path.resolve()), "size": size, "changed": changed, "hash": hashed.hexdigest()}
