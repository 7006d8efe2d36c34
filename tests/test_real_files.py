"""Files as people have them: every kind that was once read wrongly, made here, with its right value."""

import io
import itertools
import struct
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError, OutputError
from comfyui_veostyle.veo_core.style.encoder import load_style
from comfyui_veostyle.veo_core.video.audio import AudioTrack, Waveform, clip_audio, copies, read_waveform
from comfyui_veostyle.veo_core.video.codecs import OutputFormat
from comfyui_veostyle.veo_core.video.info import Clock, ReadReport
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.scenes import survey
from comfyui_veostyle.veo_core.video.writer import VideoWriter, check_writable, result_name, try_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, PngImagePlugin

from .conftest import make_video, numbered, read_number
from .test_writer import copy, pictures

SECOND = 48000


def sound(path, codec, samples, rate=SECOND, layout="mono", times=None, seconds=1, video="libx264"):
    """A film of a second or more with sound ``[channels, n]`` in pieces of 1,024, those whose time is None left out."""
    kind = {"pcm_s16le": "s16", "pcm_f32le": "flt", "flac": "s16", "aac": "fltp", "mp2": "s16"}[codec]
    with av.open(path, "w") as container:
        stream = container.add_stream(video, rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        track = container.add_stream(codec, rate=rate, layout=layout)
        for i in range(24 * seconds):
            frame = av.VideoFrame.from_ndarray(numbered(i, 96, 64), format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        resampler = av.AudioResampler(kind, layout, rate)
        for begin in range(0, samples.shape[1], 1024):
            if times is not None and not times(begin / rate):
                continue
            # Packed: PyAV looks beyond the planes of a frame that has eight.
            piece = np.ascontiguousarray(samples[:, begin : begin + 1024].T, np.float32).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(piece, "flt", layout)
            frame.rate, frame.pts, frame.time_base = rate, begin, Fraction(1, rate)
            for out in resampler.resample(frame):
                out.pts = begin
                container.mux(track.encode(out))
        container.mux(track.encode(None))
    return path


def tone(seconds, channels=1, rate=SECOND):
    return (0.3 * np.sin(np.arange(int(seconds * rate)) * 0.06)).astype(np.float32)[None].repeat(channels, 0)


def loud(waveform, rate=None):
    """First and last seconds that are louder than a tenth of full scale."""
    heard = np.flatnonzero(np.abs(waveform.samples).max(0) > 0.1)
    return heard[0] / waveform.rate, heard[-1] / waveform.rate


def with_channel_order(path, labels):
    """A MOV whose sound has its channels in an order of its own: the atom ``chan`` put into its sample description."""
    data = bytearray(path.read_bytes())
    body = struct.pack(">IIII", 0, 0, 0, len(labels)) + b"".join(struct.pack(">II3f", n, 0, 0, 0, 0) for n in labels)
    atom = struct.pack(">I4s", len(body) + 8, b"chan") + body
    old = data.find(b"chan")
    if old > 0:
        data[old : old + 4] = b"free"
    at = data.find(b"sowt") if data.find(b"sowt") > 0 else data.find(b"lpcm")
    entry = at - 4
    size = struct.unpack(">I", data[entry : entry + 4])[0]
    data[entry + size : entry + size] = atom
    # Every box that holds it grows; media data lies before, so that no offset moves.
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"):
        place = data.rfind(name, 0, entry) - 4
        data[place : place + 4] = struct.pack(">I", struct.unpack(">I", data[place : place + 4])[0] + len(atom))
    data[entry : entry + 4] = struct.pack(">I", size + len(atom))
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("layout", "labels", "order"),
    [
        ("7.1", (1, 2, 3, 4, 10, 11, 5, 6), None),
        ("5.1", (3, 1, 2, 5, 6, 4), (1, 2, 0)),
        ("stereo", (2, 1), (1, 0)),
    ],
)
def test_channels_in_an_order_of_their_own(tmp_path, layout, labels, order):
    """PyAV frees such a layout twice, which ends the process: so a process of its own looks."""
    channels = len(labels)
    samples = np.stack([tone(1)[0] * (i + 1) / channels for i in range(channels)])
    path = with_channel_order(sound(tmp_path / "v.mov", "pcm_s16le", samples, layout=layout), labels)
    code = (
        "import sys; from comfyui_veostyle.veo_core.video.reader import open_clip;"
        "from comfyui_veostyle.veo_core.video.audio import clip_audio, read_waveform;"
        "c = open_clip(sys.argv[1]); w = read_waveform(clip_audio(c));"
        "print(c.info.audio[0].channels, w.samples.shape[1], *(abs(w.samples[:3]).max(1) * 1000).round())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert told[:2] == [str(channels), "48000"]
    if order:
        loudest = [round(300 * (i + 1) / channels) for i in order]
        assert [float(v) for v in told[2:]] == pytest.approx(loudest, abs=3)


@pytest.mark.parametrize(("codec", "target"), [("pcm_s16le", "h264"), ("aac", "vp9"), ("aac", "h264")])
def test_a_gap_in_the_sound_keeps_its_length(tmp_path, codec, target):
    path = sound(tmp_path / "v.mkv", codec, tone(3), times=lambda t: not 1 <= t < 2, seconds=3)
    output = OutputFormat(target)
    result = copy(open_clip(path), tmp_path / f"out{output.suffix}", output)
    heard = read_waveform(clip_audio(result))
    begin, end = int(1.1 * heard.rate), int(1.9 * heard.rate)
    assert np.abs(heard.samples[:, begin:end]).max() < 0.02
    assert np.abs(heard.samples[:, int(2.1 * heard.rate) : int(2.9 * heard.rate)]).max() > 0.1
    assert heard.samples.shape[1] / heard.rate == pytest.approx(3, abs=0.05)


def test_packets_are_copied_only_where_none_is_missing(tmp_path):
    whole = sound(tmp_path / "a.mkv", "aac", tone(2), seconds=2)
    broken = sound(tmp_path / "b.mkv", "aac", tone(2), times=lambda t: not 0.5 <= t < 1, seconds=2)
    tracks = [AudioTrack(p, Fraction(0), Fraction(2)) for p in (whole, broken)]
    assert [copies(t, ("aac",)) for t in tracks] == [True, False]
    assert not copies(tracks[0], ("opus",))


@pytest.mark.parametrize("target", ["h264", "vp9", "prores4444", "ffv1"])
@pytest.mark.parametrize(("rate", "channels"), [(192000, 1), (11025, 2), (48000, 8), (8000, 1), (44100, 7)])
def test_any_sound_goes_into_any_codec(tmp_path, target, rate, channels):
    samples = tone(0.5, channels, rate)
    samples[:, 100:200], samples[:, 300:400] = np.nan, np.inf
    output = OutputFormat(target)
    path = tmp_path / f"v{output.suffix}"
    with VideoWriter(path, (64, 64), Fraction(24), output=output, audio=Waveform(samples, rate)) as writer:
        writer.write(pictures(12, (64, 64)), [Fraction(i, 24) for i in range(12)])
    heard = read_waveform(AudioTrack(path, Fraction(0), Fraction(1)))
    assert np.isfinite(heard.samples).all()
    assert heard.samples.shape[1] / heard.rate == pytest.approx(0.5, abs=0.1)
    assert 0.1 < np.abs(heard.samples).max() < 1


def test_layout_and_rate_that_change_within_the_stream(tmp_path):
    parts = [
        sound(tmp_path / f"{i}.ts", "mp2", tone(1, c), layout=layout)
        for i, (c, layout) in enumerate([(2, "stereo"), (1, "mono")])
    ]
    path = tmp_path / "both.ts"
    path.write_bytes(b"".join(p.read_bytes() for p in parts))
    clip = open_clip(path)
    seen = survey(clip)
    assert seen.frames == 48
    heard = read_waveform(AudioTrack(path, Fraction(0), seen.duration, clip.info.origin))
    assert heard.samples.shape[0] == 2
    assert heard.samples.shape[1] / heard.rate == pytest.approx(2, abs=0.1)
    assert np.abs(heard.samples[:, -heard.rate // 2 :]).max() > 0.1


def test_a_track_that_cannot_be_decoded_gives_the_next(tmp_path):
    path = tmp_path / "v.mov"
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        tracks = [container.add_stream(c, rate=SECOND, layout="mono") for c in ("alac", "aac")]
        for i in range(24):
            frame = av.VideoFrame.from_ndarray(numbered(i, 96, 64), format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        for track, form in zip(tracks, ("s16p", "fltp"), strict=True):
            for begin in range(0, SECOND, 4096):
                data = tone(1)[:, begin : begin + 4096]
                data = (data * 32767).astype(np.int16) if form == "s16p" else data
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(data), form, "mono")
                frame.rate, frame.pts, frame.time_base = SECOND, begin, Fraction(1, SECOND)
                container.mux(track.encode(frame))
            container.mux(track.encode(None))
    path.write_bytes(path.read_bytes().replace(b"alac", b"apac"))
    clip = open_clip(path)
    assert [a.codec for a in clip.info.audio] == ["aac"]
    assert any("cannot be decoded" in n for n in clip.info.notices)
    assert loud(read_waveform(clip_audio(clip)))[1] > 0.9


def test_tracks_flagged_as_default_are_taken(tmp_path):
    path = tmp_path / "v.mkv"
    with av.open(path, "w") as container:
        streams = [container.add_stream("libx264", rate=24) for _ in range(2)]
        for stream, default in zip(streams, (False, True), strict=True):
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            stream.disposition = av.stream.Disposition.default if default else av.stream.Disposition(0)
        for number, stream in enumerate(streams):
            for i in range(12 * (number + 1)):
                frame = av.VideoFrame.from_ndarray(numbered(i + 40 * number, 96, 64), format="rgb24")
                frame = frame.reformat(format="yuv420p")
                frame.pts, frame.time_base = i, Fraction(1, 24)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    frames = list(open_clip(path).frames())
    assert [read_number(f.image) for f in frames] == list(range(40, 64))
    assert read_number(next(open_clip(path, stream=0).frames()).image) == 0


def test_sound_of_an_avi_with_reordered_pictures_is_in_its_place(tmp_path):
    burst = np.zeros((1, SECOND), np.float32)
    burst[:, 24000:33600] = tone(0.2)
    path = sound(tmp_path / "v.avi", "pcm_s16le", burst)
    assert loud(read_waveform(clip_audio(open_clip(path)))) == pytest.approx((0.5, 0.7), abs=0.01)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 9), min_size=1, max_size=4),
    begins=st.lists(st.integers(-40, 40), min_size=4, max_size=4),
)
def test_no_frame_is_lost_without_a_word(lengths, begins):
    """Pieces whose stamps begin anywhere: all frames, ascending, or a count of those that were left out."""
    interval = Fraction(1, 24)
    stamps = [Fraction(b + k, 24) for b, n in zip([0, *begins], lengths, strict=False) for k in range(n)]
    report = ReadReport()
    clock = Clock(interval, stamps[0], report)
    times = [t for t in map(clock.at, stamps) if t is not None]
    assert all(a < b for a, b in itertools.pairwise(times))
    assert len(times) + report.repeats == len(stamps)
    assert bool(report.notices) == any(b <= a for a, b in itertools.pairwise(stamps))


def test_one_stray_stamp_moves_nothing_after_it():
    stamps = [Fraction(i, 24) for i in range(10)]
    stamps[5] = Fraction(-100)
    clock = Clock(Fraction(1, 24), stamps[0])
    assert [clock.at(s) for s in stamps] == [Fraction(i, 24) for i in range(10)]


def test_a_bare_stream_has_the_rate_that_it_says(tmp_path):
    path = make_video(tmp_path / "v.h264", 24, rate=Fraction(30))
    clip = open_clip(path)
    assert clip.info.rate == 30
    assert survey(clip).duration == pytest.approx(0.8)


def test_a_colon_in_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "12:30 clip.mp4", 4)
    clip = open_clip("12:30 clip.mp4")
    assert len(list(clip.frames())) == 4
    copy(clip, "1:2 out.mp4")
    assert len(list(open_clip("1:2 out.mp4").frames())) == 4


@pytest.mark.parametrize("start", [0.0, 2.5, 7.0, 9.96])
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_a_start_that_is_sought_gives_the_same_frames(tmp_path, start, suffix):
    path = make_video(tmp_path / f"v.{suffix}", 240, options={"bf": "3", "g": "48", "sc_threshold": "0"})
    numbers = [read_number(f.image) for f in open_clip(path, start=start, max_frames=5).frames()]
    assert numbers == list(range(round(start * 24), min(240, round(start * 24) + 5)))


def text_chunk(size):
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * size, zip=True)
    return {"pnginfo": info}


@pytest.mark.parametrize(
    ("name", "make", "wanted"),
    [
        ("16-bit grey", lambda: (Image.fromarray(np.full((32, 32), 22616, np.uint16)), {}), 22616 / 65535),
        ("float", lambda: (Image.fromarray(np.full((32, 32), 0.4, np.float32)), {}), 0.4),
        ("float of bytes", lambda: (Image.fromarray(np.full((32, 32), 102.0, np.float32)), {}), 0.4),
        ("32-bit", lambda: (Image.fromarray(np.full((32, 32), int(0.4 * (2**31 - 1)), np.int32)), {}), 0.2),
        ("workflow", lambda: (Image.new("RGB", (32, 32), (102, 102, 102)), text_chunk(3_000_000)), 0.4),
    ],
)
def test_pictures_of_any_depth(tmp_path, name, make, wanted):
    picture, how = make()
    path = tmp_path / ("p.tif" if "float" in name or name == "32-bit" else "p.png")
    picture.save(path, **how)
    style = load_style([path]).pictures[0]
    assert float(style.mean()) == pytest.approx(wanted, abs=0.002)
    assert float(next(open_clip(path).frames()).image.mean()) == pytest.approx(wanted, abs=0.002)


def test_a_profile_of_colours_is_heeded(tmp_path):
    """A profile that is sRGB with red and blue exchanged: littleCMS gives them back exchanged."""
    srgb = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    names = [bytes(srgb[132 + 12 * i : 136 + 12 * i]) for i in range(struct.unpack(">I", srgb[128:132])[0])]
    at = {n: 132 + 12 * i for i, n in enumerate(names)}
    srgb[at[b"rXYZ"] : at[b"rXYZ"] + 4], srgb[at[b"bXYZ"] : at[b"bXYZ"] + 4] = b"bXYZ", b"rXYZ"
    described = srgb.find("sRGB".encode("utf-16-be"))
    srgb[described : described + 8] = "Swap".encode("utf-16-be")
    path = tmp_path / "p.png"
    Image.new("RGB", (32, 32), (200, 40, 20)).save(path, icc_profile=bytes(srgb))
    red, _, blue = load_style([path]).pictures[0].mean((1, 2)) * 255
    assert (float(red), float(blue)) == pytest.approx((20, 200), abs=3)
    Image.new("RGB", (32, 32), (200, 40, 20)).save(path, icc_profile=b"no profile at all" * 20)
    assert float(load_style([path]).pictures[0].mean((1, 2))[0] * 255) == pytest.approx(200, abs=1)


def test_stills_that_nobody_meant(tmp_path):
    for i, name in enumerate(("①.png", "②.png", "③.png")):
        Image.fromarray(numbered(i, 96, 64)).save(tmp_path / name)
    (tmp_path / "._①.png").write_bytes(b"\0\5\x16\7 not a picture")
    assert [read_number(f.image) for f in open_clip(tmp_path).frames()] == [0, 1, 2]


@pytest.mark.parametrize("suffix", [".webp", ".png"])
def test_length_of_pictures_that_move_unevenly(tmp_path, suffix):
    stills = [Image.fromarray(numbered(i, 128, 64)) for i in range(6)]
    path = tmp_path / f"a{suffix}"
    stills[0].save(path, save_all=True, append_images=stills[1:], duration=[20, 1000, 1000, 1000, 1000, 1000])
    clip = open_clip(path, start=1.5)
    assert clip.info.duration == Fraction(502, 100)
    assert [read_number(f.image) for f in clip.frames()] == [2, 3, 4, 5]


def test_exif_that_the_decoder_cannot_name(tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "a note"
    data = io.BytesIO()
    Image.fromarray(numbered(5, 128, 64)).save(data, "JPEG", exif=exif, quality=95)
    path = tmp_path / "v.mkv"
    with av.open(path, "w") as container:
        stream = container.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuvj420p"
        for i in range(3):
            packet = av.Packet(data.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 24)
            packet.is_keyframe = True
            container.mux(packet)
    assert [read_number(f.image) for f in open_clip(path).frames()] == [5, 5, 5]
    (tmp_path / "p.jpg").write_bytes(data.getvalue())
    assert [read_number(f.image) for f in open_clip(tmp_path / "p.jpg").frames()] == [5]


@pytest.mark.parametrize(("matrix", "read"), [(8, True), (14, False), (11, False)])
def test_matrices_that_ffmpeg_does_not_convert(tmp_path, matrix, read):
    """YCgCo by its own equations, in numbers worked out by hand; others are refused in a line."""
    r, g, b = 0.8, 0.2, 0.4
    y, cg, co = r / 4 + g / 2 + b / 4, -r / 4 + g / 2 - b / 4, r / 2 - b / 2
    codes = [round(219 * y + 16), round(224 * cg + 128), round(224 * co + 128)]
    frame = av.VideoFrame(64, 64, "yuv444p")
    for plane, code in zip(frame.planes, codes, strict=True):
        plane.update(bytes([code]) * (plane.line_size * plane.height))
    path = tmp_path / "v.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv444p"
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 1
        frame.pts, frame.time_base = 0, Fraction(1, 24)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if not read:
        with pytest.raises(InputError, match="is not read"):
            open_clip(path)
        return
    assert next(open_clip(path).frames()).image.mean((1, 2)).tolist() == pytest.approx([r, g, b], abs=0.012)
    copy(open_clip(path), tmp_path / "out.mp4")


def test_alpha_of_webm_is_read_and_carried(tmp_path):
    """Of VP9 the pixels' own decoder leaves it out: it lies beside the packets."""
    alpha = torch.full((6, 1, 64, 96), 0.3)
    alpha[..., :48] = 1
    path = tmp_path / "v.webm"
    with VideoWriter(path, (96, 64), Fraction(24), output=OutputFormat("vp9"), alpha=True) as writer:
        writer.write(pictures(6, (96, 64)), [Fraction(i, 24) for i in range(6)], alpha)
    clip = open_clip(path)
    assert clip.info.alpha
    read = torch.stack([f.alpha for f in clip.frames()])
    assert read.shape == alpha.shape
    assert (read - alpha)[..., :40].abs().max() < 0.05
    assert (read - alpha)[..., 56:].abs().max() < 0.05


def test_transparency_goes_to_the_result(engine, style, tmp_path):
    from comfyui_veostyle.veo_core.options import StylizeOptions
    from comfyui_veostyle.veo_core.render import render

    for i in range(3):
        picture = np.concatenate([numbered(i, 96, 64), np.full((64, 96, 1), 60 + 60 * i, np.uint8)], axis=2)
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
    latents = engine.denoise(open_clip(tmp_path), style, StylizeOptions(), tmp_path / "w")
    render(engine, latents, tmp_path / "out.mov", OutputFormat("prores4444"))
    found = [float(f.alpha.mean()) * 255 for f in open_clip(tmp_path / "out.mov").frames()]
    assert found == pytest.approx([60, 120, 180], abs=2)
    latents.store.remove()


@pytest.mark.parametrize("size", [(128, 16), (200, 24), (24, 200)])
def test_sizes_that_an_encoder_never_finishes_are_refused(tmp_path, size):
    with pytest.raises(OutputError, match=f"{size[0]}x{size[1]}"):
        VideoWriter(tmp_path / "v.mp4", size, Fraction(24), output=OutputFormat("av1"))


def everything_in(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(
        st.sampled_from(["000001.png", "000002.png", "notes.txt", "sub/000001.png", ".hidden", "000001.PNG"]),
        min_size=1, unique=True,
    ),
    codec=st.sampled_from(["h264", "png", "png16", "webp", "ffv1"]),
)  # fmt: skip
def test_nothing_is_removed_that_no_writer_made(tmp_path_factory, names, codec):
    folder = tmp_path_factory.mktemp("out")
    output = OutputFormat(codec)
    path = folder / f"result{output.suffix}"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"mine")
    before = everything_in(folder)
    with pytest.raises(OutputError), VideoWriter(path, (64, 64), Fraction(24), output=output) as writer:
        writer.write(pictures(2, (64, 64)), [Fraction(0), Fraction(1, 24)])
    with pytest.raises(OutputError):
        try_settings(path, (64, 64), Fraction(24), output=output)
    assert everything_in(folder) == before


def test_what_comes_into_a_folder_while_it_is_written_stays(tmp_path):
    def write(extra=None):
        with VideoWriter(tmp_path / "a", (64, 64), Fraction(24), output=OutputFormat("png")) as writer:
            writer.write(pictures(2, (64, 64)), [Fraction(0), Fraction(1, 24)])
            if extra:
                (tmp_path / "a" / extra).write_text("mine")

    write()
    write()
    with pytest.raises(OutputError, match=r"notes\.txt"):
        write("notes.txt")
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_long_names_are_cut(tmp_path):
    for stem in ("x" * 240, "ü" * 120, "漢" * 83):
        name = result_name(stem, stem, ".mp4")
        check_writable(tmp_path / name, OutputFormat())
        (tmp_path / name).touch()
    with pytest.raises(OutputError, match="longer than"):
        check_writable(tmp_path / ("x" * 252 + ".mp4"), OutputFormat())


def test_settings_are_tried_before_the_first_frame(tmp_path):
    try_settings(
        tmp_path / "v.webm", (64, 64), Fraction(24), output=OutputFormat("vp9"), audio=Waveform(tone(1), SECOND)
    )
    try_settings(tmp_path / "p", (64, 64), Fraction(24), output=OutputFormat("png"))
    with pytest.raises(OutputError, match=r"v\.mp4 could not be written"):
        try_settings(tmp_path / "v.mp4", (16384, 16), Fraction(24), output=OutputFormat("h265"))
    assert list(tmp_path.iterdir()) == []


def test_text_chunks_are_all_that_is_left_out_of_a_png(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(numbered(5, 64, 128), 1))).save(
        tmp_path / "0.png", exif=exif, **text_chunk(3_000_000)
    )
    assert read_number(next(open_clip(tmp_path / "0.png").frames()).image) == 5
