"""What is done with a clip beside stylising: saved, compared, previewed, laid out on a sheet."""

import threading
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError, OutputError
from comfyui_veostyle.veo_core.video.audio import Waveform, clip_audio, read_waveform
from comfyui_veostyle.veo_core.video.codecs import CODECS, OutputFormat
from comfyui_veostyle.veo_core.video.compare import LAYOUTS, compare, joined
from comfyui_veostyle.veo_core.video.preview import FRAMES, SIDE, plays_in_browser, preview
from comfyui_veostyle.veo_core.video.reader import open_clip, read_frames
from comfyui_veostyle.veo_core.video.save import save_clip, usual_format
from comfyui_veostyle.veo_core.video.scenes import survey
from comfyui_veostyle.veo_core.video.sheet import TILE, contact_sheet, describe_scenes
from comfyui_veostyle.veo_core.video.spill import spill_frames
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
        monitor=lambda p: seen.append((p.done, p.total)),
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
    def stop(progress):
        if progress.done == 5:
            raise KeyboardInterrupt

    for work in (
        lambda: save_clip(open_clip(source), tmp_path / "x" / "o.webm", OutputFormat("vp9"), monitor=stop),
        lambda: compare(open_clip(source), open_clip(source), tmp_path / "x" / "o.mp4", monitor=stop),
        lambda: preview(open_clip(source), tmp_path / "x", monitor=stop),
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


def stream_of(path, **options):
    """A video of 12 numbered frames with reordered pictures, remuxed by PyAV alone."""
    source = make_video(path.with_name("reordered.mp4"), 12, size=SIZE, audio="stereo", options={"bf": "3", "g": "6"})
    with av.open(source) as read, av.open(path, "w", **options) as write:
        streams = {s.index: write.add_stream_from_template(s) for s in read.streams}
        for packet in read.demux():
            if packet.size:
                packet.stream = streams[packet.stream.index]
                write.mux(packet)
    return path


@pytest.mark.parametrize("name", ["a.mkv", "a.ts", "a.mov", "late.mkv"])
def test_saved_from_any_container_every_frame_is_there_with_its_sound(tmp_path, name):
    """Containers without decoding times, or that begin later than 0, are not copied to something that cannot be read."""
    path = stream_of(tmp_path / name, **({"options": {"output_ts_offset": "2"}} if "late" in name else {}))
    clip = open_clip(path)
    saved = save_clip(clip, tmp_path / "saved.mp4", OutputFormat("h264"), audio=clip_audio(clip))
    assert numbers(saved) == numbers(path)
    assert len(numbers(saved)) >= 11
    with av.open(saved) as container:
        begins = {s.type: s.start_time * s.time_base for s in container.streams if s.start_time is not None}
    assert abs(begins["video"] - begins["audio"]) < 0.1


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_source_and_result_line_up_whatever_the_fit(tmp_path, fit):
    """Three bands of colour, read into a square: compare, sheet and preview show what the clip shows."""

    def bands(index, width, height):
        picture = np.zeros((height, width, 3), np.uint8)
        for i in range(3):
            picture[:, i * width // 3 : (i + 1) * width // 3, i] = 200
        return picture

    wide = make_video(tmp_path / "wide.mp4", 4, size=(192, 64), picture=bands, options={"crf": "4"})
    clip = open_clip(wide, width=64, height=64, fit=fit)
    shown = next(iter(clip.frames())).image
    result = save_clip(clip, tmp_path / "result.mp4", OutputFormat("h264", crf=4))
    path = compare(clip, open_clip(result), tmp_path / "c.mp4", "side_by_side", OutputFormat("h264", crf=4))
    both = next(iter(open_clip(path).frames())).image
    assert (both[..., :64] - both[..., 64:]).abs().mean() < 0.02
    previewed = next(iter(open_clip(preview(clip, tmp_path)).frames())).image
    assert (previewed - shown).abs().mean() < 0.04
    sheet = contact_sheet(clip, survey(clip))[8 : 8 + TILE, 8 : 8 + TILE].movedim(-1, 0)
    small = torch.nn.functional.interpolate(sheet[None], (64, 64), mode="area")[0]
    assert (small - shown).abs().mean() < 0.04


@pytest.mark.parametrize("rate", [Fraction(24), Fraction(120)])
def test_a_gif_is_made_of_any_rate(tmp_path, rate):
    path = make_video(tmp_path / "in.mp4", 12, size=SIZE, rate=rate)
    saved = save_clip(open_clip(path), tmp_path / "o.gif", OutputFormat("gif"))
    seen = numbers(saved)
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert len(seen) >= 10


def test_sound_is_cut_to_the_pictures(source, tmp_path):
    long = Waveform(np.zeros((1, 48000 * 9), np.float32), 48000)
    clip = open_clip(source)
    for path in (
        save_clip(clip, tmp_path / "s.mp4", OutputFormat("h264", crf=30), audio=long),
        compare(clip, clip, tmp_path / "c.mp4", audio=long),
    ):
        assert read_waveform(clip_audio(open_clip(path))).samples.shape[1] < 0.7 * 48000


def test_two_at_once_make_the_same_preview(source, tmp_path):
    clip, made = open_clip(source), []
    threads = [threading.Thread(target=lambda: made.append(preview(clip, tmp_path / "p"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert numbers(made[0]) == list(range(12))
    assert [p.name for p in (tmp_path / "p").iterdir()] == [made[0].name]


def test_a_still_that_is_painted_over_has_another_preview(tmp_path):
    from PIL import Image

    stills = tmp_path / "stills"
    stills.mkdir()
    Image.new("RGB", (64, 48), "red").save(stills / "a.png")
    first = preview(open_clip(stills), tmp_path)
    Image.new("RGB", (64, 48), "green").save(stills / "a.png")
    assert preview(open_clip(stills), tmp_path) != first


def test_a_name_as_long_as_can_be_is_written(source, tmp_path):
    path = tmp_path / f"{'語' * 83}.mp4"
    save_clip(open_clip(source), path, OutputFormat("h264", crf=30))
    assert numbers(path) == list(range(12))


def test_every_pass_can_be_interrupted(source, tmp_path):
    """Each kind of work asks, before it has read many frames, whether it may go on."""

    def stop(*_):
        raise KeyboardInterrupt

    clip = open_clip(source)
    for work in (
        lambda: save_clip(clip, tmp_path / "a.mp4", OutputFormat("h264"), monitor=stop),
        lambda: save_clip(clip, tmp_path / "a.mp4", OutputFormat("h264", crf=20), monitor=stop),
        lambda: compare(clip, clip, tmp_path / "a.mp4", monitor=stop),
        lambda: preview(clip, tmp_path / "p", stop),
        lambda: contact_sheet(clip, survey(clip), stop),
        lambda: survey(clip, monitor=stop),
        lambda: read_frames(clip, 9, 2, stop),
    ):
        with pytest.raises(KeyboardInterrupt):
            work()
    assert not list(tmp_path.rglob("*.part*"))


def test_av1_plays_in_browsers_and_is_copied(source, tmp_path):
    path = save_clip(open_clip(source), tmp_path / "a.mp4", OutputFormat("av1"))
    clip = open_clip(path)
    assert clip.info.codec == "av1"
    assert plays_in_browser(clip)
    assert usual_format(clip) == OutputFormat("av1")
