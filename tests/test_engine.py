"""The pipeline: any chunk size, any interruption, one result; and what it refuses."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_veostyle.veo_core.backbones import load_backbone
from comfyui_veostyle.veo_core.cuda_graphs import CudaGraphs
from comfyui_veostyle.veo_core.engine import Stylizer
from comfyui_veostyle.veo_core.errors import BudgetError, InputError, OutputError
from comfyui_veostyle.veo_core.latents import latents_of
from comfyui_veostyle.veo_core.memory.plan import MIB, MemoryPlan, StagePeaks, make_plan
from comfyui_veostyle.veo_core.memory.trace import trace_memory
from comfyui_veostyle.veo_core.motion.flow import load_flow
from comfyui_veostyle.veo_core.options import StylizeOptions, parse_options
from comfyui_veostyle.veo_core.progress import Progress
from comfyui_veostyle.veo_core.render import render
from comfyui_veostyle.veo_core.store import RunStore, prune
from comfyui_veostyle.veo_core.style.encoder import blend_by_scene, load_style
from comfyui_veostyle.veo_core.video.audio import clip_audio
from comfyui_veostyle.veo_core.video.codecs import CODECS, OutputFormat
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.scenes import survey
from torch.utils._pytree import tree_leaves

from .conftest import EXAMPLES, make_pictures, make_video

SIZE = (96, 64)


@pytest.fixture
def clip(tmp_path):
    """Thirty frames, a cut at 18."""
    shots = make_pictures(30, SIZE, 1), make_pictures(30, SIZE, 2)
    path = make_video(
        tmp_path / "in.mp4", 30, size=SIZE, picture=lambda i, w, h: shots[i >= 18](i, w, h), options={"crf": "10"}
    )
    return open_clip(path)


def peaks_of(engine, size):
    return StagePeaks(
        engine.backbone,
        engine.flow,
        size,
        StylizeOptions().for_backbone(engine.backbone.defaults, engine.backbone.reads),
    )


def plan_of(engine: Stylizer, encode: int, decode: int) -> MemoryPlan:
    stages = {"encode": 1, "denoise": 1, "decode": 1}
    return MemoryPlan(engine.backbone.device, 1 << 40, 1, encode, decode, stages, 0, 0)


def frames_of(engine, clip, style, folder, options=None, plan=None, monitor=lambda p: None):
    latents = engine.denoise(clip, style, options or StylizeOptions(), folder, plan, monitor)
    try:
        return torch.cat(list(engine.decode(latents)))
    finally:
        latents.store.close()


def test_chunk_size_does_not_change_the_result(engine, clip, style, tmp_path):
    results = [frames_of(engine, clip, style, tmp_path / str(c), plan=plan_of(engine, c, c)) for c in (1, 4, 16)]
    assert results[0].shape == (30, 3, 64, 96)
    assert [s.start for s in survey(clip).scenes] == [0, 18]
    for other in results[1:]:
        assert (results[0] - other).abs().max() < 1e-4


def test_interrupted_anywhere_it_goes_on_to_the_same_bits(engine, clip, style, tmp_path):
    class Stop(Exception):
        pass

    whole = frames_of(engine, clip, style, tmp_path / "whole")
    calls = 0

    def count(progress):
        nonlocal calls
        calls += progress.stage == "denoise"

    frames_of(engine, clip, style, tmp_path / "count", monitor=count)
    for stop_at in range(1, calls, max(1, calls // 5)):
        seen = 0

        def stop(progress, stop_at=stop_at):
            nonlocal seen
            seen += progress.stage == "denoise"
            if seen == stop_at:
                raise Stop

        folder = tmp_path / f"stop{stop_at}"
        with pytest.raises(Stop):
            frames_of(engine, clip, style, folder, monitor=stop)
        assert torch.equal(frames_of(engine, clip, style, folder), whole)


def test_a_changed_option_begins_anew(engine, clip, style, tmp_path):
    a = frames_of(engine, clip, style, tmp_path / "w")
    b = frames_of(engine, clip, style, tmp_path / "w", StylizeOptions(strength=0.5))
    assert len([p for p in (tmp_path / "w").iterdir() if p.is_dir()]) == 2
    assert (a - b).abs().mean() > 0.01


def test_strength_zero_is_the_reconstructed_source(engine, clip, style, tmp_path):
    latents = engine.denoise(clip, style, StylizeOptions(strength=0), tmp_path)
    first = next(clip.frames()).image[None]
    assert torch.equal(latents.store.read("latents", 0, 1), engine.backbone.encode(torch.cat([first] * 4))[:1])
    latents.store.close()


def test_steps_and_guidance_are_taken(engine, clip, style, tmp_path):
    short = open_clip(clip.path, max_frames=5)
    plain = frames_of(engine, short, style, tmp_path)
    more = frames_of(engine, short, style, tmp_path, StylizeOptions(steps=4))
    guided = frames_of(engine, short, style, tmp_path, StylizeOptions(guidance=12.5))
    for other in (more, guided):
        assert other.isfinite().all()
        assert 0.001 < (other - plain).abs().mean() < 0.35


def test_style_shows(engine, style, tmp_path):
    """The palette of the result is nearer to the painting's than the source's is."""
    clip = open_clip(EXAMPLES / "city.mp4", max_frames=2, width=256)
    result = frames_of(engine, clip, style, tmp_path)
    source = torch.stack([f.image for f in clip.frames()])
    painting = style.pictures[0]

    def moments(x):
        x = x.movedim(-3, 0).flatten(1)
        return torch.cat([x.mean(1), torch.cov(x).flatten() * 4])

    assert (moments(result) - moments(painting)).norm() < 0.5 * (moments(source) - moments(painting)).norm()


def test_returning_shot_takes_its_old_anchor(engine, style, tmp_path):
    shots = make_pictures(5, SIZE, 1), make_pictures(5, SIZE, 2)
    path = make_video(
        tmp_path / "v.mp4",
        20,
        size=SIZE,
        picture=lambda i, w, h: shots[(i // 5) % 2](i % 5, w, h),
        options={"crf": "8"},
    )
    latents = engine.denoise(open_clip(path), style, StylizeOptions(), tmp_path / "w")
    assert [(s.start, s.anchor) for s in latents.survey.scenes] == [(0, 0), (5, 5), (10, 0), (15, 5)]
    first, again = latents.store.read("latents", 0, 1), latents.store.read("latents", 10, 1)
    assert (first - again).abs().mean() < 0.1 * first.abs().mean()
    latents.store.close()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [(96, 64), (67, 51), (33, 16)])
def test_few_frames_and_odd_sizes(engine, style, tmp_path, count, size):
    path = make_video(tmp_path / "v.mp4", count, size=size, pixel_format="yuv444p")
    result = frames_of(engine, open_clip(path), style, tmp_path / "w")
    assert result.shape == (count, 3, size[1], size[0])


def test_rendered_file_has_the_source_s_times_and_sound(engine, style, tmp_path):
    path = make_video(tmp_path / "v.mp4", 10, size=SIZE, audio="stereo", picture=make_pictures(10, SIZE))
    clip = open_clip(path)
    latents = engine.denoise(clip, style, StylizeOptions(), tmp_path / "w")
    out = render(
        engine,
        latents,
        tmp_path / "out.mp4",
        audio=clip_audio(clip),
        metadata={"workflow": "{}"},
    )
    latents.store.remove()
    assert survey(open_clip(out)).times == latents.survey.times
    assert open_clip(out).info.audio[0].channels == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.mp4", "v.mp4", "w"]
    assert list((tmp_path / "w").iterdir()) == []


def test_render_goes_on_after_an_interruption(engine, style, tmp_path, monkeypatch):
    from comfyui_veostyle.veo_core import render as module

    monkeypatch.setattr(module, "SEGMENT", 8)
    path = make_video(tmp_path / "v.mp4", 30, size=SIZE, picture=make_pictures(30, SIZE))
    latents = engine.denoise(open_clip(path), style, StylizeOptions(), tmp_path / "w")

    class Stop(Exception):
        pass

    def stop(progress: Progress):
        if progress.done >= 20:
            raise Stop

    with pytest.raises(Stop):
        render(engine, latents, tmp_path / "a.mp4", monitor=stop)
    assert not (tmp_path / "a.mp4").exists()
    asked = []
    render(engine, latents, tmp_path / "a.mp4", monitor=lambda p: asked.append(p.done))
    assert min(asked[1:]) >= 16
    latents.store.remove()
    again = engine.denoise(open_clip(path), style, StylizeOptions(), tmp_path / "w")
    render(engine, again, tmp_path / "b.mp4")
    again.store.remove()
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_every_kind_of_output(engine, style, tmp_path, codec):
    path = make_video(tmp_path / "v.mp4", 5, size=SIZE, picture=make_pictures(5, SIZE))
    latents = engine.denoise(open_clip(path), style, StylizeOptions(), tmp_path / "w")
    output = OutputFormat(codec)
    out = render(engine, latents, tmp_path / f"out{output.suffix}", output)
    latents.store.remove()
    assert len(list(open_clip(out).frames())) == 5


def test_killed_process_resumes_to_the_same_file(tmp_path):
    """SIGKILL well into a run of the command line; run again, it ends in the bits of an undisturbed run."""
    path = make_video(tmp_path / "v.mp4", 60, size=(192, 128), picture=make_pictures(60, (192, 128)))
    tool = Path(sys.executable).with_name("veostyle")
    if not tool.exists():
        pytest.skip("the console script is not installed")

    def command(out):
        return [tool, "stylize", "--video_path", path, "--style_image", EXAMPLES / "van_gogh.jpg", "--output_dir", out]

    subprocess.run(command(tmp_path / "whole"), check=True, capture_output=True)
    work = tmp_path / "killed" / ".veostyle"
    process = subprocess.Popen(command(tmp_path / "killed"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if list(work.glob("*/segment*.mp4")):
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    name = f"v_{'van_gogh'}.mp4"
    assert not (tmp_path / "killed" / name).exists()
    assert work.exists()
    subprocess.run(command(tmp_path / "killed"), check=True, capture_output=True)
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(work.glob("*"))


def test_budget_too_small_names_the_smallest(engine):
    with pytest.raises(BudgetError, match=r"smallest that works is ([\d,]+) MiB") as caught:
        make_plan(peaks_of(engine, (256, 144)), (256, 144), 50 * MIB)
    least = int(str(caught.value).split("smallest that works is ")[1].split(" MiB")[0].replace(",", ""))
    plan = make_plan(peaks_of(engine, (256, 144)), (256, 144), least * MIB)
    assert plan.decode_chunk == 1
    assert plan.peak <= least * MIB
    with pytest.raises(BudgetError):
        make_plan(peaks_of(engine, (256, 144)), (256, 144), (least - 2) * MIB)


def test_plan_grows_with_size_and_not_with_length(engine):
    small, large = (make_plan(peaks_of(engine, s), s, 1 << 34) for s in ((128, 64), (256, 128)))
    assert 3 < (large.peak - large.weights) / (small.peak - small.weights) < 5
    assert "peak" in small.describe()


def test_trace_counts_what_lives_together():
    def compute():
        a = torch.empty(1000, 256)
        b = a + 1
        del a
        c = b * 2
        del b
        return c.sum()

    assert trace_memory(compute).peak == pytest.approx(2 * 1000 * 256 * 4, rel=0.01)
    convolution, tensor = torch.nn.Conv2d(4, 4, 3, padding=1), 4 * 4 * 64 * 64
    assert trace_memory(lambda: convolution(torch.empty(1, 4, 64, 64))).peak == pytest.approx(4 * tensor, rel=0.01)


def test_options_name_what_is_wrong(engine):
    for values, says in (
        ({"strength": 3}, "strength = 3"),
        ({"steps": 0}, "steps = 0"),
        ({"colour": 1}, "colour = 1"),
        ({"guidance": float("nan")}, "guidance"),
        ({"detector": "psychic"}, "detector = 'psychic'"),
    ):
        with pytest.raises(InputError, match=says):
            parse_options(**values)
    with pytest.raises(InputError, match="overlap = 9"):
        StylizeOptions(window=12, overlap=9).for_backbone(engine.backbone.defaults, engine.backbone.reads)


def test_store_is_used_by_one_run_at_a_time(tmp_path):
    shapes = {"latents": (3, 2, 2)}
    store = RunStore(tmp_path / "r", {"a": 1}, shapes)
    with pytest.raises(OutputError, match="in use"):
        RunStore(tmp_path / "r", {"a": 1}, shapes)
    store.write("latents", 1, torch.ones(2, 2, 2))
    store.close()
    again = RunStore(tmp_path / "r", {"a": 1}, shapes)
    assert again.resumed
    assert again.read("latents", 0, 3).sum() == 8
    assert again.mapped("latents").shape == (3, 2, 2)
    with pytest.raises(IndexError):
        again.read("latents", 2, 2)
    again.close()
    changed = RunStore(tmp_path / "r", {"a": 2}, shapes)
    assert not changed.resumed
    assert changed.read("latents", 0, 3).sum() == 0
    changed.close()
    prune(tmp_path, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_the_run(tmp_path, monkeypatch):
    """Mapped files on a full disk would end the process with SIGBUS."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="keeps .* MB"):
        RunStore(tmp_path / "huge", {}, {"latents": (1 << 36, 32, 64, 64)})
    store = RunStore(tmp_path / "r", {}, {"latents": (3, 2, 2)})
    monkeypatch.setattr("comfyui_veostyle.veo_core.store.save_file", full)
    store.save_state("denoise", {"a": torch.ones(1)})
    with pytest.raises(OutputError, match="No space left"):
        store.flush()
    store.close()
    assert not list((tmp_path / "r").glob("*.part"))


@pytest.mark.parametrize("overlap", [0, 4])
def test_a_window_s_first_frame_is_not_warped_from_the_anchor(engine, style, tmp_path, overlap):
    """The anchor stands before it in the batch, but the flow leads to the frame before the window."""
    seen = []

    class Spy:
        def __getattr__(self, name):
            return getattr(engine.backbone, name)

        def sample(self, condition, job):
            seen.append(job.motion)
            return job.fuse(0, job.content)

    clip = open_clip(make_video(tmp_path / "a.mkv", 20, codec="ffv1"))
    Stylizer(Spy(), engine.flow).denoise(clip, style, StylizeOptions(window=8, overlap=overlap), tmp_path / "w")
    assert len(seen) > 2
    for motion in seen:
        assert motion[:2].abs().max() == 0
        assert motion[2:, 2].max() > 0


def test_latent_from_elsewhere_is_refused():
    with pytest.raises(InputError, match="ST-Norm Denoiser"):
        latents_of({"samples": torch.zeros(1, 4, 8, 8)})


def test_latents_of_another_model_are_not_decoded(engine, clip, style, tmp_path):
    class Other:
        name = "another model"

        def __getattr__(self, name):
            return getattr(engine.backbone, name)

    latents = engine.denoise(clip, style, StylizeOptions(), tmp_path / "w")
    with pytest.raises(InputError, match="made by veo-mini, and the model is another model"):
        next(Stylizer(Other(), engine.flow).decode(latents))
    latents.store.close()


def test_each_scene_takes_its_own_style(engine, clip, style, tmp_path):
    """The style that a scene is given is the one that it would have alone; a scene beyond the list takes the last."""
    other = load_style([EXAMPLES / "van_gogh.jpg"])
    options = StylizeOptions(strength=0.8)
    one, two = (frames_of(engine, clip, s, tmp_path / s.digest, options) for s in (style, other))
    mixed = frames_of(engine, clip, blend_by_scene([style, other], [[1, 0], [0, 1]]), tmp_path / "mixed", options)
    assert torch.equal(mixed[:18], one[:18])
    assert torch.equal(mixed[18:], two[18:])
    assert (one[18:] - two[18:]).abs().max() > 0.05


def test_progress_names_every_stage_and_never_goes_back(engine, clip, style, tmp_path):
    told = []
    latents = engine.denoise(clip, style, StylizeOptions(steps=3), tmp_path / "run", monitor=told.append)
    render(engine, latents, tmp_path / "out.mp4", monitor=told.append)
    latents.store.close()
    assert next(p.stage for p in told) == "survey"
    for stage in ("encode", "denoise", "decode"):
        done = [p.done for p in told if p.stage == stage]
        assert done == sorted(done), stage
        assert {p.total for p in told if p.stage == stage} == {30}
    assert len({p.done for p in told if p.stage == "denoise"}) > 6
    again = []
    latents = engine.denoise(clip, style, StylizeOptions(steps=3), tmp_path / "run", monitor=again.append)
    render(engine, latents, tmp_path / "out.mp4", monitor=again.append)
    latents.store.close()
    last = {p.stage: p.done for p in again}
    assert last == {"survey": 30, "denoise": 30, "decode": 30}
    assert {p.stage: p.resumed for p in again} == {"survey": 0, "denoise": 30, "decode": 30}


class _Replayed:
    """A captured call without a GPU: it has buffers of its own, and writes over what every other call gave."""

    def __init__(self, function, inputs, others):
        self.function, self.inputs, self.graph, self.others = function, [x.clone() for x in inputs], self, others
        self.output = function(*self.inputs)
        others.append(self)

    def replay(self):
        made = tree_leaves(self.function(*self.inputs))
        for other in self.others:
            for x in tree_leaves(other.output):
                x.fill_(float("nan"))
        for mine, x in zip(tree_leaves(self.output), made, strict=True):
            mine.copy_(x)


@pytest.mark.parametrize(
    ("device", "guidance"),
    [("cpu", 2.0), *(pytest.param("cuda", g, marks=pytest.mark.gpu) for g in (1.0, 2.0))],
)
def test_captured_calls_give_what_launched_ones_give(device, guidance, style, tmp_path, monkeypatch):
    """Over cuts, windows of several lengths, chunks that are not full, and steps whose moments are carried on."""
    captured = []
    if device == "cpu":
        capture = lambda self, function, inputs: _Replayed(function, inputs, captured)  # noqa: E731
        monkeypatch.setattr(CudaGraphs, "_capture", capture)
    device = torch.device(device)
    engine = Stylizer(load_backbone(None, device), load_flow(device))
    shots = make_pictures(49, SIZE, 1), make_pictures(49, SIZE, 2)
    clip = open_clip(make_video(tmp_path / "in.mp4", 49, size=SIZE, picture=lambda i, w, h: shots[i >= 30](i, w, h)))
    results, options = [], StylizeOptions(steps=2, guidance=guidance)
    for graphs in (True, False):
        plan = replace(plan_of(engine, 3, 5), graphs=graphs)
        results.append(frames_of(engine, clip, style, tmp_path / str(graphs), options, plan))
    assert len(results[0]) == 49
    assert (results[0] - results[1]).abs().max() < (1e-4 if device.type == "cpu" else 0.02)
    assert len(captured) >= 3 or device.type == "cuda"
