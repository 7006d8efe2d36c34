"""What is done with a clip beside stylising: saved, compared, previewed, laid out on a sheet."""

from dataclasses import replace
from fractions import Fraction

import av
import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError, OutputError
from comfyui_veostyle.veo_core.video.audio import clip_audio
from comfyui_veostyle.veo_core.video.compare import LAYOUTS, compare, joined
from comfyui_veostyle.veo_core.video.preview import FRAMES, SIDE, plays_in_browser, preview
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.save import save_clip, usual_format
from comfyui_veostyle.veo_core.video.scenes import survey
from comfyui_veostyle.veo_core.video.sheet import TILE, contact_sheet, describe_scenes
from comfyui_veostyle.veo_core.video.spill import spill_frames
from comfyui_veostyle.veo_core.video.writer import CODECS, OutputFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import make_pictures, make_video, read_number

SIZE = (96, 64)


@pytest.fixture
def source(tmp_path):
    return make_video(tmp_path / "in.mp4", 12, size=SIZE, audio="stereo")


def numbers(path, **settings):
    return [read_number(f.image) for f in open_clip(path, **settings).frames()]


@pytest.mark.parametrize("codec", CODECS)
def test_a_clip_is_saved_in_every_format(source, tmp_path, codec):
    clip = open_clip(source, start=Fraction(1, 12))
    output = OutputFormat(codec)
    seen = []
    path = save_clip(
        clip,
        tmp_path / f"out{output.suffix}",
        output,
        audio=clip_audio(clip),
        progress=lambda d, t: seen.append((d, t)),
    )
    assert numbers(path) == list(range(2, 12))
    assert seen[-1] == (10, 10)
    if output.joins:
        assert open_clip(path).info.audio


def test_a_whole_file_of_the_same_codec_is_copied(source, tmp_path):
    """Bit for bit, with tags and sound; a cut, a size or a quality means encoding anew."""

    def packets(path):
        with av.open(path) as container:
            return [bytes(p) for p in container.demux(video=0) if p.size]

    clip = open_clip(source)
    assert usual_format(clip) == OutputFormat("h264")
    copied = save_clip(
        clip, tmp_path / "c.mp4", OutputFormat("h264"), audio=clip_audio(clip), metadata={"workflow": "{}"}
    )
    assert packets(copied) == packets(source)
    with av.open(copied) as container:
        assert container.metadata["workflow"] == "{}"
        assert container.streams.audio
    for other, output in (
        (open_clip(source, max_frames=6), OutputFormat("h264")),
        (open_clip(source, width=48, height=32), OutputFormat("h264")),
        (clip, OutputFormat("h264", crf=30)),
    ):
        assert packets(save_clip(other, tmp_path / "n.mp4", output)) != packets(source)
    turned = make_video(tmp_path / "turned.mp4", 4, size=SIZE, rotation=90)
    upright = save_clip(open_clip(turned), tmp_path / "upright.mp4", OutputFormat("h264"))
    assert open_clip(upright).size == (SIZE[1], SIZE[0])


def test_frames_from_memory_are_saved_as_an_mp4_would_be(tmp_path):
    spilled = spill_frames(torch.rand(3, 32, 48, 3), Fraction(24), tmp_path)
    assert usual_format(open_clip(spilled)) == OutputFormat("h264")


def test_transparency_is_kept_where_the_format_has_it(tmp_path):
    images = tmp_path / "stills"
    images.mkdir()
    from PIL import Image

    for i in range(3):
        Image.new("RGBA", (48, 32), (200, 40, 40, 80 * i)).save(images / f"{i}.png")
    path = save_clip(open_clip(images), tmp_path / "a.mov", OutputFormat("prores4444"))
    alphas = [float(f.alpha.mean()) for f in open_clip(path).frames()]
    assert alphas == pytest.approx([0, 80 / 255, 160 / 255], abs=0.02)


def test_an_interrupted_save_leaves_nothing(source, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    for work in (
        lambda: save_clip(open_clip(source), tmp_path / "x" / "o.webm", OutputFormat("vp9"), progress=stop),
        lambda: compare(open_clip(source), open_clip(source), tmp_path / "x" / "o.mp4", progress=stop),
        lambda: preview(open_clip(source), tmp_path / "x", progress=stop),
    ):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            work()
        assert not list((tmp_path / "x").iterdir())
    with pytest.raises(OutputError, match=r"cannot go into '\.mp4'"):
        save_clip(open_clip(source), tmp_path / "o.mp4", OutputFormat("ffv1"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compared_frames_stand_side_by_side(source, tmp_path, layout):
    result = make_video(tmp_path / "r.mp4", 12, size=(48, 32), audio="mono")
    path = compare(
        open_clip(source), open_clip(result), tmp_path / "c.mp4", layout, audio=clip_audio(open_clip(result))
    )
    out = open_clip(path)
    assert out.size == {"split": (48, 32), "side_by_side": (96, 32), "stacked": (48, 64)}[layout]
    assert out.info.audio
    frames = list(out.frames())
    assert [f.time for f in frames] == [f.time for f in open_clip(result).frames()]
    if layout == "side_by_side":
        assert [read_number(f.image[..., :48]) for f in frames] == list(range(12))
        assert [read_number(f.image[..., 48:]) for f in frames] == list(range(12))


def test_compare_wants_as_many_frames_of_both(source, tmp_path):
    with pytest.raises(InputError, match="source has 6 frames and video 12"):
        compare(open_clip(source, max_frames=6), open_clip(source), tmp_path / "c.mp4")
    assert not (tmp_path / "c.mp4").exists()


@given(st.fractions(0, 20), st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_the_split_shows_source_left_and_result_right_of_a_line(time, width):
    before, after = torch.zeros(3, 4, width), torch.full((3, 4, width), 0.5)
    out = joined(before, after, "split", time)[0, 0].tolist()
    assert out == sorted(out, key=lambda v: {0.0: 0, 1.0: 1, 0.5: 2}[v])


def test_a_preview_follows_the_clip_s_settings(source, tmp_path):
    clip = open_clip(source, start=Fraction(1, 6), every_nth=2, width=64, height=64, fit="crop")
    path = preview(clip, tmp_path / "new")
    shown = open_clip(path)
    assert shown.size == (64, 64)
    assert plays_in_browser(shown)
    assert [f.time for f in shown.frames()] == [f.time for f in clip.frames()]
    assert preview(clip, tmp_path / "new") == path
    assert preview(replace(clip, every_nth=1), tmp_path / "new") != path
    make_video(source, 11, size=SIZE)
    assert preview(open_clip(source), tmp_path / "new") != path


def test_a_preview_is_small_and_short(tmp_path):
    wide = make_video(tmp_path / "wide.mp4", FRAMES + 3, size=(1000, 120))
    shown = open_clip(preview(open_clip(wide), tmp_path))
    assert shown.size[0] == SIDE
    assert len(list(shown.thumbnails())) == FRAMES
    assert not plays_in_browser(open_clip(make_video(tmp_path / "a.mkv", 2)))


def test_a_sheet_shows_the_middle_of_each_scene(tmp_path):
    shots = [make_pictures(30, SIZE, seed) for seed in (1, 2)]
    path = make_video(
        tmp_path / "in.mp4", 30, size=SIZE, picture=lambda i, w, h: shots[10 <= i < 20](i, w, h), options={"crf": "4"}
    )
    clip = open_clip(path)
    seen = survey(clip)
    sheet = contact_sheet(clip, seen)
    assert sheet.shape == (8 + 2 * (160 + 44 + 8), 8 + 2 * (TILE + 8), 3)
    wanted = next(replace(clip, width=TILE, height=160, fit="stretch").picked([5]))
    tile = sheet[8:168, 8 : 8 + TILE].movedim(-1, 0)
    assert (tile - wanted.image).abs().max() < 2 / 255
    text = describe_scenes(seen).splitlines()
    assert text[0] == "30 frames, 1.25 s, 3 scenes"
    assert text[2] == "scene 2: 0.42 to 0.83 s, frames 10 to 19"
    assert text[3].endswith("frames 20 to 29, returns to 1")


def test_picked_frames_are_those_that_reading_gives(source):
    clip = open_clip(source, every_nth=2)
    whole = list(clip.frames())
    picked = list(clip.picked({0, 3, 99}))
    assert [f.index for f in picked] == [0, 3]
    assert all(torch.equal(f.image, whole[f.index].image) and f.time == whole[f.index].time for f in picked)
    assert not list(clip.picked([]))
