"""Video in: every frame at its own time, upright, in the right colours, whatever the file."""

import itertools
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.video.codecs import OutputFormat
from comfyui_veostyle.veo_core.video.color import ColorTags, from_rgb
from comfyui_veostyle.veo_core.video.reader import ReadReport, open_clip
from comfyui_veostyle.veo_core.video.writer import VideoWriter
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from .conftest import make_video, numbered, read_number

KINDS = {
    "constant": {},
    "ntsc film": {"rate": Fraction(24000, 1001)},
    "ntsc": {"rate": Fraction(30000, 1001)},
    "60": {"rate": Fraction(60)},
    "variable": {"times": [Fraction(i * i + 3 * i, 240) for i in range(12)]},
    "10 bit": {"pixel_format": "yuv420p10le"},
    "odd size": {"size": (129, 67), "pixel_format": "yuv444p"},
    "5.1 audio": {"audio": "5.1"},
    "one frame": {"count": 1},
    "two frames": {"count": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_at_its_own_time(tmp_path, kind):
    settings_ = KINDS[kind]
    count, rate = settings_.get("count", 12), settings_.get("rate", Fraction(24))
    clip = open_clip(make_video(tmp_path / "v.mp4", **settings_))
    frames = list(clip.frames())
    assert [read_number(f.image) for f in frames] == list(range(count))
    wanted = settings_.get("times") or [i / rate for i in range(count)]
    assert all(abs(f.time - w) < Fraction(1, 20000) for f, w in zip(frames, wanted, strict=True))
    assert clip.size == settings_.get("size", (128, 64))
    assert bool(clip.info.audio) == ("audio" in settings_)
    assert clip.info.bits == (10 if kind == "10 bit" else 8)


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotated_video_is_upright(tmp_path, rotation):
    def lying(index, width, height):
        return np.ascontiguousarray(np.rot90(numbered(index, *upright), rotation // 90))

    upright = (128, 64) if rotation == 180 else (64, 128)
    clip = open_clip(make_video(tmp_path / "v.mp4", size=(128, 64), rotation=-rotation, picture=lying))
    flipped = open_clip(make_video(tmp_path / "w.mp4", size=(128, 64), rotation=rotation, picture=lying))
    assert clip.size == upright == flipped.size
    numbers = [[read_number(f.image) for f in c.frames()] for c in (clip, flipped)]
    assert list(range(12)) in numbers
    # A picture turned the wrong way shows no number that counts up; at 180 degrees both are one.
    ours = clip if numbers[0] == list(range(12)) else flipped
    assert (numbers[0] == numbers[1]) == (rotation == 180)
    # FFmpeg's own player decides which of the two tags this picture needs.
    with av.open(ours.path) as container:
        frame = next(container.decode(video=0))
    assert frame.rotation % 360 == -ours.info.rotation % 360


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    rate=st.sampled_from([Fraction(12), Fraction(24), Fraction(30000, 1001), Fraction(50)]),
    start=st.integers(0, 60),
)
def test_forced_rate_shows_the_frame_of_that_time(tmp_path_factory, gaps, rate, start):
    times = [Fraction(sum(gaps[:i]), 100) for i in range(len(gaps))]
    path = make_video(
        tmp_path_factory.mktemp("v") / "v.mkv", len(gaps), times=times, codec="ffv1", pixel_format="yuv444p"
    )
    begin = Fraction(start, 100)
    with av.open(path) as container:
        stamped = [f.pts * f.time_base for f in container.decode(video=0)]
    assume(begin <= stamped[-1])
    clip = open_clip(path, rate=rate, start=begin)
    for frame in clip.frames():
        at = begin + frame.time
        assert read_number(frame.image) == max(i for i, t in enumerate(stamped) if t <= at)


def test_trim_cap_and_every_nth_by_time(tmp_path):
    path = make_video(tmp_path / "v.mp4", 48)

    def numbers(**how):
        return [read_number(f.image) for f in open_clip(path, **how).frames()]

    assert numbers(start=0.5, duration=0.5) == list(range(12, 24))
    assert numbers(every_nth=5, max_frames=3) == [0, 5, 10]
    assert numbers(rate=12, start=1) == list(range(24, 48, 2))
    assert numbers(rate=12, every_nth=3) == list(range(0, 48, 6))
    assert [f.index for f in open_clip(path).frames(first=45)] == [45, 46, 47]


@pytest.mark.parametrize("matrix", [1, 6, 9])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bits", [8, 10, 12])
def test_tagged_colours(tmp_path, matrix, full, bits):
    colour = np.float32([224, 172, 105]) / 255
    pixel_format = {8: "yuv420p", 10: "yuv420p10le", 12: "yuv420p12le"}[bits]
    codec = "ffv1"
    frame = from_rgb(np.broadcast_to(colour[:, None, None], (3, 64, 64)), pixel_format, ColorTags(matrix, full=full))
    path = tmp_path / "v.mkv"
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 64, pixel_format
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 2 if full else 1
        frame.pts, frame.time_base = 0, Fraction(1, 24)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    clip = open_clip(path)
    assert (clip.info.tags.matrix, clip.info.tags.full) == (matrix, full)
    image = next(clip.frames()).image
    assert (image.amax((1, 2)) - torch.from_numpy(colour)).abs().max() * 255 < (1.6 if bits == 8 else 0.5)


def test_ten_bit_ramp_keeps_its_levels(tmp_path):
    codes = np.arange(64, 941).repeat(2)[: 876 * 2].reshape(1, -1).repeat(64, 0).astype("<u2")
    path = tmp_path / "v.mkv"
    with av.open(path, "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = codes.shape[1], 64, "yuv420p10le"
        frame = av.VideoFrame(codes.shape[1], 64, "yuv420p10le")
        for plane, values in zip(frame.planes, (codes, np.full((32, codes.shape[1] // 2), 512, "<u2")), strict=False):
            padded = np.zeros((values.shape[0], plane.line_size // 2), "<u2")
            padded[:, : values.shape[1]] = values
            plane.update(padded.tobytes())
        frame.planes[2].update(np.full((32, frame.planes[2].line_size // 2), 512, "<u2").tobytes())
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert len(next(open_clip(path).frames()).image[1, 5].unique()) == 876


def test_high_dynamic_range_is_mapped_with_a_notice(tmp_path):
    def white(index, width, height):
        return np.full((height, width, 3), 148, np.uint8)  # PQ code of about 203 nits

    path = make_video(
        tmp_path / "v.mp4",
        8,
        codec="libx265",
        pixel_format="yuv420p10le",
        picture=white,
        tags={"color_trc": 16, "color_primaries": 9, "colorspace": 9},
        options={"x265-params": "log-level=error"},
    )
    clip = open_clip(path)
    assert any("tone-mapped" in n for n in clip.info.notices)
    assert 0.8 < float(next(clip.frames()).image.mean()) < 0.95


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_animated_pictures(tmp_path, suffix):
    stills = [Image.fromarray(numbered(i, 128, 64)) for i in range(5)]
    path = tmp_path / f"a{suffix}"
    stills[0].save(path, save_all=True, append_images=stills[1:], duration=[100, 50, 50, 200, 100], loop=0)
    clip = open_clip(path)
    frames = list(clip.frames())
    assert [read_number(f.image) for f in frames] == list(range(5))
    assert [float(f.time) for f in frames] == pytest.approx([0, 0.1, 0.15, 0.2, 0.4], abs=1e-3)


def test_folder_of_stills_in_natural_order(tmp_path):
    for i in range(12):
        Image.fromarray(numbered(i, 128, 64)).save(tmp_path / f"still{i}.png")
    clip = open_clip(tmp_path)
    assert [read_number(f.image) for f in clip.frames()] == list(range(12))
    assert [read_number(f.image) for f in open_clip(tmp_path, rate=12).frames()] == list(range(0, 12, 2))


def test_alpha_becomes_a_mask(tmp_path):
    picture = np.concatenate([numbered(1, 128, 64), np.full((64, 128, 1), 128, np.uint8)], axis=2)
    Image.fromarray(picture).save(tmp_path / "0.png")
    clip = open_clip(tmp_path)
    frame = next(clip.frames())
    assert clip.info.alpha
    assert frame.image.shape == (3, 64, 128)
    assert frame.alpha.shape == (1, 64, 128)
    assert float(frame.alpha.mean()) == pytest.approx(128 / 255, abs=0.01)


def test_pixel_aspect_is_applied(tmp_path):
    path = make_video(tmp_path / "v.mp4", 2, size=(96, 64), tags={"sample_aspect_ratio": Fraction(4, 3)})
    clip = open_clip(path)
    assert clip.size == (128, 64)
    assert read_number(next(clip.frames(first=1)).image) == 1


def test_resizing(tmp_path):
    path = make_video(tmp_path / "v.mp4", 2, size=(256, 128))
    assert open_clip(path, width=128).size == (128, 64)
    assert open_clip(path, height=96).size == (192, 96)
    for fit in ("crop", "pad", "stretch"):
        image = next(open_clip(path, width=64, height=64, fit=fit).frames()).image
        assert image.shape == (3, 64, 64)
    padded = next(open_clip(path, width=64, height=64, fit="pad").frames()).image
    assert float(padded[:, :14].max()) == 0
    assert float(padded[:, 20:40].mean()) > 0.05


def test_corrupt_packets_do_not_shift_the_rest(tmp_path):
    path = make_video(tmp_path / "v.mkv", 24, codec="mpeg4", options={"g": "1"})
    data = bytearray(path.read_bytes())
    with av.open(path) as container:
        packets = [p for p in container.demux(video=0) if p.size]
        broken = bytes(packets[10])
    at = data.find(broken[20:60])
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    assert at >= 0
    report = ReadReport()
    frames = list(open_clip(path).frames(report=report))
    assert len(frames) >= 21
    for frame in frames:
        index = round(frame.time * 24)
        if abs(index - 10) > 1:
            assert read_number(frame.image) == index


def test_truncated_file_gives_what_is_there(tmp_path):
    path = make_video(tmp_path / "v.mkv", 48, codec="mpeg4", options={"g": "4"})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    report = ReadReport()
    frames = list(open_clip(path).frames(report=report))
    assert 5 < len(frames) < 47
    assert report.truncated
    assert [read_number(f.image) for f in frames[:-1]] == list(range(len(frames) - 1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "gone.mp4", "does not exist"),
        (lambda p: _file(p / "empty.mp4", b""), "is empty"),
        (lambda p: _file(p / "text.mp4", b"this is not a video" * 50), "not a video"),
        (lambda p: _sound(p / "sound.mp4"), "no video stream"),
        (lambda p: p, "folder without pictures"),
    ],
)
def test_bad_files_are_named(tmp_path, make, says):
    path = make(tmp_path)
    with pytest.raises(InputError, match=says) as caught:
        open_clip(path)
    assert str(path) in str(caught.value)


def test_bad_spans_and_sizes_are_named(tmp_path):
    path = make_video(tmp_path / "v.mp4")
    for how, says in (
        ({"start": 9}, "past the end"),
        ({"start": -1}, "start = -1"),
        ({"width": 4}, "width = 4"),
        ({"every_nth": 0}, "every_nth = 0"),
        ({"stream": 3}, "stream = 3"),
    ):
        with pytest.raises(InputError, match=says):
            open_clip(path, **how)


def _file(path, data):
    path.write_bytes(data)
    return path


def _sound(path):
    with av.open(path, "w") as container:
        stream = container.add_stream("aac", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_start_between_frames_begins_with_the_frame_on_show(tmp_path):
    times = [Fraction(t) for t in (0, 10, 20, 25)]
    path = make_video(tmp_path / "v.mkv", 4, times=times, codec="ffv1", pixel_format="yuv444p")
    frames = list(open_clip(path, start=5).frames())
    assert [read_number(f.image) for f in frames] == [0, 1, 2, 3]
    assert [float(f.time) for f in frames] == pytest.approx([0, 5, 15, 20], abs=0.01)
    assert [read_number(f.image) for f in open_clip(path, start=22).frames()] == [2, 3]


def test_times_that_jump_back_lose_no_frame(tmp_path):
    parts = [
        make_video(tmp_path / f"{i}.ts", n, codec="mpeg2video", options={"bf": "0"}) for i, n in enumerate((30, 40))
    ]
    path = tmp_path / "both.ts"
    path.write_bytes(b"".join(p.read_bytes() for p in parts))
    report = ReadReport()
    frames = list(open_clip(path).frames(report=report))
    assert len(frames) >= 68
    assert report.jumps == 1
    assert any("jump back" in n for n in report.notices)
    assert all(a.time < b.time for a, b in itertools.pairwise(frames))


def test_stills_that_lie_on_their_side_are_not_squeezed(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(numbered(5, 64, 128), 1))).save(
        tmp_path / "0.jpg", exif=exif, quality=95
    )
    clip = open_clip(tmp_path)
    assert clip.size == (64, 128)
    assert read_number(next(clip.frames()).image) == 5


def test_sixteen_bit_grey_stills_keep_their_levels(tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(32, 0)
    Image.fromarray(ramp).save(tmp_path / "0.png")
    image = next(open_clip(tmp_path).frames()).image
    assert float(image.mean()) == pytest.approx(0.5, abs=0.01)
    assert len(image[0, 0].unique()) == 256


def test_numbers_that_are_none(tmp_path):
    path = make_video(tmp_path / "v.mp4")
    for name in ("start", "duration", "rate", "max_frames"):
        for value in (float("nan"), float("inf"), -1):
            with pytest.raises(InputError, match=f"{name} = "):
                open_clip(path, **{name: value})
    with pytest.raises(InputError, match="128x6"):
        open_clip(make_video(tmp_path / "strip.mp4", 2, size=(640, 32)), width=128)


def test_sixteen_bit_pictures_keep_their_levels(tmp_path):
    ramp = torch.linspace(0, 1, 1024)[None, None, None].expand(1, 3, 32, -1)
    with VideoWriter(tmp_path / "deep", (1024, 32), Fraction(24), output=OutputFormat("png16")) as writer:
        writer.write(ramp, [Fraction(0)])
    image = next(open_clip(tmp_path / "deep").frames()).image
    assert len(image[1, 0].unique()) == 1024
    assert (image - ramp[0]).abs().max() < 1e-4


@pytest.mark.parametrize("suffix", ["avi", "mkv", "mp4", "ts", "mov"])
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_reordered_pictures_are_all_read_in_order(tmp_path, codec, suffix):
    path = make_video(tmp_path / f"v.{suffix}", 30, codec=codec, options={"bf": "3", "g": "12"})
    frames = list(open_clip(path).frames())
    assert [read_number(f.image) for f in frames] == list(range(30))
    assert float(frames[-1].time) == pytest.approx(29 / 24, abs=0.002)
