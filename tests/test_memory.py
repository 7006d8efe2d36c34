"""Budget, plan and what a run takes: policies, the watch, the pictures of both."""

import threading
import time

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.memory import watch as watching
from comfyui_veostyle.veo_core.memory.chart import COLOURS, WIDTH, draw_plan, draw_report
from comfyui_veostyle.veo_core.memory.plan import MIB, RESERVE, MemoryPlan
from comfyui_veostyle.veo_core.memory.watch import MOST_SAMPLES, MemoryTrace, MemoryWatch, RunMemory
from comfyui_veostyle.veo_core.options import parse_options
from comfyui_veostyle.veo_core.progress import Progress
from comfyui_veostyle.veo_core.video.reader import open_clip

from .conftest import make_video

CPU = torch.device("cpu")
STAGES = {"encode": 300 * MIB, "denoise": 500 * MIB, "decode": 400 * MIB}


def plan(**changes):
    settings = dict(cache={"encode": 10 * MIB, "denoise": 100 * MIB}, reserve=0) | changes
    return MemoryPlan(CPU, 2000 * MIB, 200 * MIB, 4, 4, STAGES, 0, 0, **settings)


def test_lean_takes_less_and_gives_the_same(engine, style, tmp_path):
    clip = open_clip(make_video(tmp_path / "in.mp4", 9, size=(96, 64)))
    options = parse_options()
    results = []
    for policy in ("fast", "lean"):
        made = engine.plan(clip, options, 1 << 34, policy)
        latents = engine.denoise(clip, style, options, tmp_path / policy, made)
        results.append((made, torch.cat(list(engine.decode(latents)))))
        latents.store.close()
    (fast, a), (lean, b) = results
    assert (lean.encode_chunk, lean.decode_chunk) == (1, 1)
    assert fast.decode_chunk > 1
    assert lean.peak < fast.peak
    assert (a - b).abs().max() < 1e-3


def test_what_is_free_leaves_a_reserve_and_a_budget_none(engine, tmp_path):
    clip = open_clip(make_video(tmp_path / "in.mp4", 3, size=(96, 64)))
    free = engine.plan(clip, parse_options(), free=8 << 30)
    assert free.reserve == int((8 << 30) * RESERVE)
    assert free.budget + free.reserve == 8 << 30
    assert engine.plan(clip, parse_options(), 1 << 30).reserve == 0
    assert 0 < free.cache["denoise"] <= free.stages["denoise"]
    assert "reserve" in free.describe()


def progress(stage):
    return Progress(stage, 0)


def test_a_watch_measures_each_stage_and_ends(monkeypatch):
    used = {"now": 1000 * MIB}
    monkeypatch.setattr(MemoryWatch, "_used", lambda self: used["now"])
    told = []
    with MemoryWatch(plan(), told.append) as watch:
        for stage, size in (("encode", 1100), ("denoise", 1400), ("encode", 1200), ("decode", 1050)):
            watch(progress(stage))
            used["now"] = size * MIB
            time.sleep(0.15)
            watch._sample()
    assert [p.stage for p in told] == ["encode", "denoise", "encode", "decode"]
    assert watch.trace.peaks["denoise"] == (200 + 400) * MIB
    assert watch.trace.peaks["encode"] >= 300 * MIB
    times = [t for t, *_ in watch.trace.samples]
    assert times == sorted(times)
    assert "memory watch" not in {t.name for t in threading.enumerate()}


def test_a_watch_ends_when_the_run_fails():
    with pytest.raises(KeyboardInterrupt), MemoryWatch(plan(), lambda p: None):
        raise KeyboardInterrupt
    assert "memory watch" not in {t.name for t in threading.enumerate()}


def test_a_watch_takes_constant_space_and_loses_no_peak(monkeypatch):
    """In however long a run, however often stages change: the interval stays, and the largest sample of each stage too."""
    sizes, clock = iter(range(100 * MOST_SAMPLES)), iter(range(100 * MOST_SAMPLES))
    monkeypatch.setattr(watching, "INTERVAL", 60)
    monkeypatch.setattr(MemoryWatch, "_used", lambda self: next(sizes) * MIB)
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock) / 10)
    with MemoryWatch(plan(), lambda p: None) as watch:
        for number in range(5 * MOST_SAMPLES):
            watch(progress("encode" if number % 2 else "denoise"))
            assert len(watch.samples) <= MOST_SAMPLES + 1
        watch._sample()
        assert max(size for *_, size in watch.samples) == max(watch.peaks.values())
    times = [t for t, *_ in watch.samples]
    assert times == sorted(times)


def colours_of(picture):
    seen = picture.mul(255).round().byte().reshape(-1, 3).unique(dim=0)
    return {"#" + bytes(colour).hex() for colour in seen.tolist()}


def test_the_plan_s_picture_shows_every_part():
    picture = draw_plan(plan(reserve=1000 * MIB))
    assert picture.shape[1:] == (WIDTH, 3)
    assert picture.min() >= 0
    assert picture.max() <= 1
    assert {COLOURS[part] for part in ("weights", "cache", "activations")} <= colours_of(picture)
    small = MemoryPlan(CPU, 750 * MIB, 200 * MIB, 1, 1, STAGES, 0, 0, {}, 200 * MIB)
    assert COLOURS["reserve"] in colours_of(draw_plan(small))
    assert COLOURS["cache"] not in colours_of(draw_plan(small)[95:])


def test_bars_are_as_long_as_what_they_stand_for():
    """Of the denoise bar, activations are to weights as 400 to 200."""
    row = draw_plan(plan())[100 + 76 + 5].mul(255).round().byte()
    counts = {
        part: int((row == torch.tensor([int(c[i : i + 2], 16) for i in (1, 3, 5)])).all(-1).sum())
        for part, c in COLOURS.items()
    }
    assert counts["activations"] / counts["weights"] == pytest.approx(2, rel=0.02)
    assert counts["cache"] / counts["weights"] == pytest.approx(0.5, rel=0.05)


def test_the_report_holds_measured_against_planned():
    trace = MemoryTrace(
        ((0.0, "encode", 300 * MIB), (1.0, "denoise", 770 * MIB)), {"encode": 300 * MIB, "denoise": 770 * MIB}
    )
    later = MemoryTrace(((0.5, "decode", 540 * MIB),), {"decode": 540 * MIB, "denoise": 100 * MIB})
    memory = RunMemory(None, "fast", plan(), (trace, later))
    assert memory.peaks == {"encode": 300 * MIB, "denoise": 770 * MIB, "decode": 540 * MIB}
    assert "denoise: 700 MiB planned, 770 MiB measured (+10.0 %)" in memory.describe()
    assert "decode: 600 MiB planned, 540 MiB measured (-10.0 %)" in memory.describe()
    picture = draw_report(memory)
    assert picture.shape[1:] == (WIDTH, 3)
    assert {"#6c8ebf", "#5fa777", "#c9785d"} <= colours_of(picture)
    for empty in (RunMemory(), RunMemory(plan=plan())):
        with pytest.raises(InputError, match="VAE Decode"):
            draw_report(empty)
