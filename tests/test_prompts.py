"""Words along a clip, brackets, blends of styles."""

from fractions import Fraction

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.style.encoder import blend_by_scene, blend_styles, parse_shares, style_from_tensors
from comfyui_veostyle.veo_core.style.prompts import Prompts, parse_prompts, weighted_parts
from comfyui_veostyle.veo_core.video.scenes import Scene, Survey
from hypothesis import given
from hypothesis import strategies as st


def survey(frames=48, rate=24, cuts=(0, 20)):
    ends = [*cuts[1:], frames]
    scenes = tuple(Scene(a, b, a) for a, b in zip(cuts, ends, strict=True))
    return Survey(tuple(Fraction(i, rate) for i in range(frames)), Fraction(frames, rate), scenes)


def test_lines_and_marks():
    prompts = parse_prompts(
        "a village\nby the sea\n@scene 2 at night\n@12 in rain\n@1.5s: in snow\n@ frame 3 dry", "  blurry "
    )
    assert prompts.text == "a village by the sea"
    assert prompts.scenes == ((2, "at night"),)
    assert dict(prompts.keys) == {12: "in rain", Fraction(3, 2): "in snow", 3: "dry"}
    assert prompts.negative == "blurry"
    assert [at for at, _ in prompts.checked(survey()).keys] == [3, 12, 36]
    assert not parse_prompts(" \n", "blurry")


@given(st.integers(0, 47), st.integers(0, 1))
def test_shares_sum_to_one_and_change_gradually(frame, scene):
    prompts = parse_prompts("x\n@scene 2 y\n@8 a\n@40 b").checked(survey())
    parts = prompts.at(frame, scene)
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert all(("y" in text) == (scene == 1) for text, _ in parts)
    later = dict(prompts.at(min(frame + 1, 47), scene))
    for text, share in parts:
        assert abs(later.get(text, 0) - share) <= 1 / 32 + 1e-9


@given(st.integers(0, 47))
def test_texts_are_all_that_a_clip_asks_for(frame):
    prompts = parse_prompts("x\n@scene 2 y\n@8 a\n@0.5s c\n@40 b", "z").checked(survey())
    scene = int(frame >= 20)
    known = {text for text, at in prompts.texts(survey()) if at == scene}
    assert {text for text, _ in prompts.at(frame, scene)} | {"", "z"} <= known


@pytest.mark.parametrize(
    "line", ["@soon rain", "@ rain", "@scene 0 rain", "@1.5 rain", "@frame 3s rain", "@-3 rain", "@scene x"]
)
def test_marks_that_are_none_are_told(line):
    with pytest.raises(InputError, match="prompt line"):
        parse_prompts(f"a house\n{line}")


@pytest.mark.parametrize(
    ("line", "says"), [("@48 x", "@48: the clip has 48"), ("@3s x", "@3s: .* 2.00 s"), ("@scene 3 x", "2 scene")]
)
def test_places_outside_the_clip_are_told(line, says):
    with pytest.raises(InputError, match=says):
        parse_prompts(line).checked(survey())


def test_a_text_without_end_is_told():
    with pytest.raises(InputError, match="too long"):
        parse_prompts("x" * 30_000)


def test_brackets_weigh():
    assert weighted_parts("a (fast:1.3) cat") == [("a ", 1.0), ("fast", 1.3), (" cat", 1.0)]
    assert weighted_parts("(a (b:2):0.5)") == [("a ", 0.5), ("b", 1.0)]
    assert weighted_parts("(a)") == [("a", 1.1)]
    assert weighted_parts(r"\(a\)") == [("(a)", 1.0)]
    assert weighted_parts("a:1.3") == [("a:1.3", 1.0)]


@given(st.text(alphabet="ab ():.1\\", max_size=30))
def test_brackets_never_lose_words(text):
    parts = weighted_parts(text)
    assert all(words for words, _ in parts)
    assert "".join(w for w, _ in parts).count("a") == text.count("a")


def test_blends_keep_pictures_and_words():
    picture = torch.rand(3, 16, 16)
    a = style_from_tensors([picture, picture], [1, 3], 1.0, Prompts("oil"))
    b = style_from_tensors([picture], None, 0.5, Prompts("ink", keys=((4, "rain"),), negative="blurry"))
    mixed = blend_styles([a, b], [0.6, 0.4])
    assert mixed.weights == pytest.approx((0.15, 0.45, 0.4))
    assert mixed.weight == pytest.approx(0.8)
    assert mixed.prompts.text == "(oil:1.2), (ink:0.8)"
    assert mixed.prompts.keys == ((4, "(rain:0.8)"),)
    assert mixed.prompts.negative == "blurry"
    alone = blend_styles([a, b], [1, 0])
    assert (alone.weights, alone.weight, alone.prompts.text) == (a.weights, 1.0, "oil")
    words = blend_styles([a, style_from_tensors([], prompts=Prompts("ink"))], [0.5, 0.5])
    assert words.weights == pytest.approx(a.weights)
    assert len({a.digest, b.digest, mixed.digest, words.digest}) == 4
    for weights in ([0, 0], [-1, 2], [1]):
        with pytest.raises(InputError, match="blend weights"):
            blend_styles([a, b], weights)


def test_styles_are_blended_scene_by_scene():
    a, b = (style_from_tensors([torch.full((3, 16, 16), v)], weight=w) for v, w in ((0.0, 1.0), (1.0, 0.5)))
    blended = blend_by_scene([a, b], [[1, 0], [0.5, 0.5], [0, 1]])
    assert [s.weights for s in blended.by_scene] == [(1.0,), (0.5, 0.5), (1.0,)]
    assert [s.weight for s in blended.by_scene] == [1.0, 0.75, 0.5]
    assert blended.pictures[0].max() == 0
    assert blended.digest != blend_by_scene([a, b], [[1, 0], [0.5, 0.5]]).digest
    again = blend_styles([blended, a], [0.5, 0.5])
    assert len(again.by_scene) == 3
    assert again.by_scene[2].weights == (0.5, 0.5)
    assert blend_by_scene([a, b], [[0.5, 0.5]]).digest == blend_styles([a, b], [0.5, 0.5]).digest
    assert blend_by_scene([a, b], [[1, 0], [0, 1], [0, 1]]).digest == blend_by_scene([a, b], [[1, 0], [0, 1]]).digest
    assert blend_by_scene([a, b], [[1, 0], [1, 0]]).digest == blend_styles([a, b], [1, 0]).digest
    with pytest.raises(InputError, match="empty"):
        blend_by_scene([a, b], [])


def test_shares_by_scene_are_read():
    assert parse_shares("0, .5,1") == [0, 0.5, 1]
    for wrong in ("", "a", "0;1", "2", "-0.1", "nan", "1,,0"):
        with pytest.raises(InputError, match="scenes"):
            parse_shares(wrong)
