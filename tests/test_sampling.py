"""Windows, noise, schedules, guidance."""

import pytest
import torch
from comfyui_veostyle.veo_core.sampling.guidance import guide
from comfyui_veostyle.veo_core.sampling.noise import frame_noise
from comfyui_veostyle.veo_core.sampling.schedule import FlowSchedule
from comfyui_veostyle.veo_core.sampling.windows import blend_shared, windows_of
from comfyui_veostyle.veo_core.video.scenes import Scene
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(2, 16), st.data())
def test_windows_cover_every_frame_and_cross_no_cut(lengths, size, data):
    overlap = data.draw(st.integers(0, size // 2))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    scenes = tuple(Scene(s, s + n, s) for s, n in zip(starts, lengths, strict=True))
    windows = windows_of(scenes, size, overlap)
    fresh = [f for w in windows for f in range(w.start + w.shared, w.end)]
    assert fresh == list(range(sum(lengths)))
    for w in windows:
        assert w.scene.start <= w.start < w.end <= w.scene.end
        assert w.end - w.start <= size
        assert (w.start - w.scene.start) % (size - overlap) == 0
        assert w.last == (w.end == w.scene.end)
        assert w.shared == (overlap if w.start > w.scene.start else 0)


def test_shared_frames_pass_from_one_window_to_the_next():
    before, now = torch.zeros(4, 1, 1, 1), torch.ones(4, 1, 1, 1)
    mixed = blend_shared(before, now).flatten().tolist()
    assert mixed == pytest.approx([0.2, 0.4, 0.6, 0.8])


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 5))
def test_noise_belongs_to_seed_and_frame(seed, first, count):
    shape = (2, 3, 3)
    together = frame_noise(seed, range(first, first + count), shape)
    alone = torch.cat([frame_noise(seed, range(f, f + 1), shape) for f in range(first, first + count)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[0], frame_noise(seed + 1, range(first, first + 1), shape)[0])
    assert not torch.equal(together[0], frame_noise(seed, range(first + 1, first + 2), shape)[0])


def test_noise_is_standard_normal():
    noise = frame_noise(3, range(40), (4, 16, 16))
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_flow_schedule_reaches_a_constant_prediction(steps):
    schedule, x, clean = FlowSchedule(steps), torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert schedule.sigmas[0] == 1
    assert len(schedule.sigmas) == steps
    start = x
    for i, sigma in enumerate(schedule.sigmas):
        assert torch.allclose(x, torch.lerp(clean, start, sigma), atol=1e-5)
        x = schedule.step(i, x, clean)
    assert torch.allclose(x, clean, atol=1e-5)


def test_guidance():
    styled, plain = torch.randn(2, 2, 3, 8, 8)
    assert torch.allclose(guide(styled, plain, 1), styled, atol=1e-6)
    assert torch.allclose(guide(styled, plain, 0), plain)
    strong = guide(styled, plain, 12.5)
    for moment in (torch.mean, torch.std):
        assert torch.allclose(moment(strong, dim=(-2, -1)), moment(styled, dim=(-2, -1)), atol=1e-4)
    assert not torch.allclose(strong, styled, atol=0.1)
