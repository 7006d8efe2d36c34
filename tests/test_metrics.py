"""Metrics: each says what its name says, and a blur is not taken for steadiness."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.metrics.report import measure
from comfyui_veostyle.veo_core.metrics.structure import gradient_correlation, ssim
from comfyui_veostyle.veo_core.metrics.temporal import TemporalMetrics, occlusion_mask
from comfyui_veostyle.veo_core.video.reader import open_clip

from .conftest import make_pictures, make_video


def score(frames):
    metrics = TemporalMetrics()
    none, seen = torch.zeros(1, 2, 48, 48), torch.ones(1, 1, 48, 48)
    source = torch.full((1, 3, 48, 48), 0.5)
    for before, now in itertools.pairwise(frames):
        metrics.add(now, before, source, source, none, seen)
    return metrics.values()


def test_still_frames_score_zero():
    frame = torch.rand(1, 3, 48, 48)
    values = score([frame] * 3)
    assert values["e_warp"] == pytest.approx(0, abs=1e-9)
    assert values["still_change"] == pytest.approx(0, abs=1e-6)


def test_a_blur_lowers_the_error_but_not_what_stands_beside_it():
    torch.manual_seed(0)
    noisy = [torch.rand(1, 3, 48, 48) for _ in range(4)]
    blurred = [F.avg_pool2d(f, 5, 1, 2) for f in noisy]
    sharp, soft = score(noisy), score(blurred)
    assert soft["e_warp"] < 0.3 * sharp["e_warp"]
    assert soft["e_over_detail"] > sharp["e_over_detail"]
    assert soft["detail_share"] < 0.6 * sharp["detail_share"]


def test_motion_boundaries_are_left_out():
    flow = torch.zeros(1, 2, 16, 16)
    flow[..., 8:] = 3
    mask = occlusion_mask(flow, -flow)
    assert not mask[..., 7].any()
    assert mask[0, 0, 2:12, 2:6].all()


def test_structure():
    a, b = torch.rand(2, 1, 3, 32, 32)
    assert ssim(a, a) == pytest.approx(1)
    assert gradient_correlation(a, a) == pytest.approx(1)
    assert ssim(a, b) < 0.3
    assert abs(gradient_correlation(a, b)) < 0.3


def test_videos_that_do_not_match_are_named(engine, tmp_path):
    paths = {
        name: make_video(tmp_path / f"{name}.mp4", count, size=size, picture=make_pictures(count, size))
        for name, count, size in (("a", 6, (96, 64)), ("b", 5, (96, 64)), ("c", 6, (64, 64)), ("d", 1, (96, 64)))
    }
    a = open_clip(paths["a"])
    for other, says in (("b", "number of frames"), ("c", "one size")):
        with pytest.raises(InputError, match=says):
            measure(open_clip(paths[other]), a, engine.flow)
    with pytest.raises(InputError, match="one frame"):
        measure(open_clip(paths["d"]), open_clip(paths["d"]), engine.flow)
