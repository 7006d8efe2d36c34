"""Video out: what is written reads back, lasts as long, and is whole or not there."""

import errno
from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest
import torch
from comfyui_veostyle.veo_core.errors import OutputError
from comfyui_veostyle.veo_core.video import writer as writer_module
from comfyui_veostyle.veo_core.video.audio import AudioTrack, Waveform, clip_audio, cut_to, read_waveform
from comfyui_veostyle.veo_core.video.codecs import OutputFormat, available_codecs
from comfyui_veostyle.veo_core.video.color import ColorTags
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.scenes import survey
from comfyui_veostyle.veo_core.video.writer import VideoWriter, check_writable, decode_times, join, tick
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from .conftest import make_video, numbered, read_number
from .test_reader import KINDS


def pictures(count, size=(128, 64)):
    stack = np.stack([numbered(i, *size) for i in range(count)])
    return torch.from_numpy(stack).movedim(-1, 1).float() / 255


def copy(clip, path, output=None, metadata=None):
    """Reads a clip and writes it again, as the engine does."""
    seen = survey(clip)
    times = list(seen.times)
    with VideoWriter(
        path,
        clip.size,
        clip.nominal_rate,
        time_base=tick(times, 1 / clip.nominal_rate),
        output=output,
        tags=clip.info.tags,
        audio=cut_to(clip_audio(clip), seen.duration),
        metadata=metadata,
    ) as writer:
        for frame in clip.frames():
            writer.write(frame.image[None], [frame.time])
    return open_clip(path)


@pytest.mark.parametrize("codec", [c for c, there in available_codecs().items() if there])
@pytest.mark.parametrize("size", [(128, 64), (129, 67)])
def test_every_codec_reads_back(tmp_path, codec, size):
    output = OutputFormat(codec)
    path = tmp_path / f"v{output.suffix}"
    with VideoWriter(path, size, Fraction(24), output=output) as writer:
        writer.write(pictures(9, size), [Fraction(i, 24) for i in range(9)])
    clip = open_clip(path)
    frames = list(clip.frames())
    assert [read_number(f.image) for f in frames] == list(range(9))
    assert all(0 <= a - b <= 1 for a, b in zip(clip.size, size, strict=True))
    if codec != "webp":
        assert (frames[3].image[:, :64, :128] - pictures(4, size)[3][:, :64, :128]).abs().mean() < 0.03
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@given(st.lists(st.integers(-(1 << 40), 1 << 40), unique=True, max_size=20))
def test_pictures_are_decoded_one_after_another_before_they_are_shown(shown):
    decoded = decode_times(shown)
    assert decoded == sorted(set(decoded))
    assert all(d <= s for d, s in zip(decoded, shown, strict=True))
    assert not shown or any(d == s for d, s in zip(decoded, shown, strict=True))


@pytest.mark.parametrize("codec", ["h264", "h265", "vp9", "av1"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_clips_shorter_than_an_encoder_looks_ahead(tmp_path, codec, count):
    """x265 leaves their decoding times to chance, and a container then refuses them, or takes nonsense."""
    output = OutputFormat(codec)
    with VideoWriter(tmp_path / f"v{output.suffix}", (96, 64), Fraction(12), output=output) as writer:
        writer.write(pictures(count, (96, 64)), [Fraction(i, 12) for i in range(count)])
    with av.open(str(tmp_path / f"v{output.suffix}")) as container:
        packets = [p for p in container.demux(video=0) if p.size]
        unit = packets[0].time_base * 12
    assert len(packets) == count
    assert all(p.dts <= p.pts for p in packets)
    assert all(abs((b.dts - a.dts) * unit - 1) < 0.02 for a, b in pairwise(packets))
    assert 0 <= (packets[0].pts - packets[0].dts) * unit <= 4


@pytest.mark.parametrize("kind", [*KINDS, "no audio"])
def test_count_duration_and_audio_survive(tmp_path, kind):
    settings = dict(KINDS.get(kind, {}))
    if kind in ("constant", "variable", "ntsc"):
        settings["audio"] = "stereo"
    clip = open_clip(make_video(tmp_path / "in.mp4", **settings))
    result = copy(clip, tmp_path / "out.mp4")
    before, after = survey(clip), survey(result)
    assert after.frames == before.frames
    assert [read_number(f.image) for f in result.frames()] == list(range(before.frames))
    assert all(abs(a - b) < Fraction(1, 20000) for a, b in zip(after.times, before.times, strict=True))
    assert abs(after.duration - before.duration) < Fraction(1, 24) / 2
    assert len(result.info.audio) == len(clip.info.audio)
    if clip.info.audio:
        sounds = [read_waveform(AudioTrack(c.path, Fraction(0), Fraction(60))) for c in (clip, result)]
        assert result.info.audio[0].channels == clip.info.audio[0].channels
        lengths = [s.samples.shape[1] / s.rate for s in sounds]
        assert abs(lengths[0] - lengths[1]) <= 1024 / 48000 or lengths[1] == pytest.approx(
            float(before.duration), abs=0.05
        )


def test_audio_is_cut_to_the_same_span(tmp_path):
    path = make_video(tmp_path / "in.mp4", 72, audio="stereo", audio_seconds=3.0)
    clip = open_clip(path, start=1, duration=1)
    result = copy(clip, tmp_path / "out.mp4")
    full = read_waveform(AudioTrack(path, Fraction(0), Fraction(3)))
    part = read_waveform(AudioTrack(result.path, Fraction(0), Fraction(3)))
    assert part.samples.shape[1] == pytest.approx(48000, abs=2 * 1024)
    middle = part.samples[0, 12000:24000]
    lags = range(-1200, 1200)
    scores = [float(np.dot(middle, full.samples[0, 60000 + lag : 72000 + lag])) for lag in lags]
    assert abs(list(lags)[int(np.argmax(scores))]) <= 64


def test_waveform_is_encoded(tmp_path):
    sound = Waveform((0.1 * np.sin(np.arange(44100) / 20)).astype(np.float32)[None].repeat(2, 0), 44100)
    with VideoWriter(tmp_path / "v.webm", (128, 64), Fraction(24), output=OutputFormat("vp9"), audio=sound) as writer:
        writer.write(pictures(24), [Fraction(i, 24) for i in range(24)])
    read = read_waveform(AudioTrack(tmp_path / "v.webm", Fraction(0), Fraction(5)))
    assert read.samples.shape[0] == 2
    assert read.samples.shape[1] / read.rate == pytest.approx(1.0, abs=0.05)
    heard, n = read.samples[0, 12000:36000], np.arange(24000) * (44100 / 48000)
    wave = [np.dot(heard, f(n / 20)) for f in (np.sin, np.cos)]
    assert np.hypot(*wave) / (np.linalg.norm(heard) * 12000**0.5) > 0.95


@pytest.mark.parametrize("matrix", [1, 6])
def test_six_passes_keep_skin(tmp_path, matrix):
    skin = (224, 172, 105)

    def flat(index, width, height):
        return np.full((height, width, 3), skin, np.uint8)

    source = tmp_path / "0.mp4"
    with VideoWriter(source, (128, 64), Fraction(24), tags=ColorTags(matrix)) as writer:
        image = torch.tensor(skin).float().div(255)[None, :, None, None].expand(4, 3, 64, 128)
        writer.write(image, [Fraction(i, 24) for i in range(4)])
    clip = open_clip(source)
    for i in range(5):
        clip = copy(clip, tmp_path / f"{i + 1}.mp4")
    image = next(clip.frames()).image * 255
    assert (image - torch.tensor(skin)[:, None, None]).abs().max() <= 2


def test_metadata_stays_beside_audio(tmp_path):
    clip = open_clip(make_video(tmp_path / "in.mp4", audio="stereo"))
    result = copy(clip, tmp_path / "out.mp4", metadata={"workflow": '{"a": 1}', "prompt": "{}"})
    with av.open(result.path) as container:
        assert container.metadata["workflow"] == '{"a": 1}'
        assert container.metadata["prompt"] == "{}"
        assert container.streams.audio


def test_joined_parts_equal_one_file(tmp_path):
    images, times = pictures(30), [Fraction(i, 24) for i in range(30)]
    parts = []
    for begin in (0, 12, 24):
        path = tmp_path / f"{begin}.mp4"
        with VideoWriter(path, (128, 64), Fraction(24)) as writer:
            writer.write(images[begin : begin + 12], [t - times[begin] for t in times[begin : begin + 12]])
        parts.append((path, times[begin]))
    join(parts, tmp_path / "all.mp4", OutputFormat())
    frames = list(open_clip(tmp_path / "all.mp4").frames())
    assert [read_number(f.image) for f in frames] == list(range(30))
    assert [f.time for f in frames] == times


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = VideoWriter(tmp_path / "v.mp4", (128, 64), Fraction(24))
    with pytest.raises(OutputError, match="disk is full"), writer:
        writer.write(pictures(2), [Fraction(0), Fraction(1, 24)])
        monkeypatch.setattr(writer_module, "from_rgb", full)
        writer.write(pictures(1), [Fraction(2, 24)])
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_result_survives_a_failure(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"earlier")
    with pytest.raises(RuntimeError), VideoWriter(path, (128, 64), Fraction(24)) as writer:
        writer.write(pictures(2), [Fraction(0), Fraction(1, 24)])
        raise RuntimeError
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: VideoWriter(p / "v.avi", (64, 64), Fraction(24)), "cannot go into"),
        (lambda p: VideoWriter(p / "no" / "v.mp4", (64, 64), Fraction(24)), "is not a folder"),
        (lambda p: OutputFormat("divx"), "codec = divx is unknown"),
        (lambda p: OutputFormat("h264", crf=99), "crf = 99"),
        (lambda p: OutputFormat("gif", crf=9), "crf = 9"),
        (lambda p: OutputFormat("gif", deep=True), "10-bit"),
    ],
)
def test_bad_outputs_are_named(tmp_path, make, says):
    with pytest.raises(OutputError, match=says):
        make(tmp_path)


def test_tick_is_exact_for_any_frame_rate():
    for rate in (Fraction(24), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(25, 2)):
        times = [i / rate for i in range(100)]
        base = tick(times, 1 / rate)
        assert all((t / base).denominator == 1 for t in times)
    assert tick([Fraction(0)], Fraction(1, 25)) == Fraction(1, 25)


@pytest.mark.parametrize("codec", ["h264", "h265"])
def test_parts_of_any_spacing_can_be_joined(tmp_path, codec):
    """Frames that come ever more slowly: a part's first decoding times lie before the part before it ends."""
    images, parts, times, offset = pictures(60), [], [], Fraction(0)
    for k, gap in enumerate((Fraction(1, 30), Fraction(1), Fraction(1, 60))):
        own = [gap * i for i in range(20)]
        path = tmp_path / f"{k}.mp4"
        with VideoWriter(
            path, (128, 64), Fraction(24), time_base=Fraction(1, 90000), output=OutputFormat(codec)
        ) as writer:
            writer.write(images[20 * k : 20 * k + 20], own)
        parts.append((path, offset))
        times += [offset + t for t in own]
        offset += 20 * gap
    join(parts, tmp_path / "all.mp4", OutputFormat(codec))
    frames = list(open_clip(tmp_path / "all.mp4").frames())
    assert [read_number(f.image) for f in frames] == list(range(60))
    assert all(abs(f.time - t) < Fraction(1, 5000) for f, t in zip(frames, times, strict=True))


@pytest.mark.parametrize("codec", ["ffv1", "vp9", "h264"])
def test_audio_lies_beside_the_pictures_of_its_time(tmp_path, codec):
    sound = Waveform(np.zeros((1, 20 * 48000), np.float32), 48000)
    output = OutputFormat(codec)
    path = tmp_path / f"v{output.suffix}"
    with VideoWriter(path, (64, 64), Fraction(4), output=output, audio=sound) as writer:
        writer.write(torch.rand(80, 3, 64, 64), [Fraction(i, 4) for i in range(80)])
    clocks = {"video": 0.0, "audio": 0.0}
    with av.open(path) as container:
        for packet in container.demux():
            if packet.dts is not None:
                clocks[packet.stream.type] = float(packet.dts * packet.time_base)
                assert abs(clocks["video"] - clocks["audio"]) < 12


def test_audio_lasts_no_longer_than_the_pictures(tmp_path):
    clip = open_clip(make_video(tmp_path / "in.mp4", 72, audio="stereo"), max_frames=24)
    assert cut_to(clip_audio(clip), survey(clip).duration).duration == 1
    result = copy(clip, tmp_path / "out.mp4")
    assert read_waveform(clip_audio(result)).samples.shape[1] == pytest.approx(48000, abs=2048)
    assert cut_to(Waveform(np.zeros((1, 96000)), 48000), Fraction(1)).samples.shape[1] == 48000


def test_metadata_in_another_encoding_does_not_stop_the_writer(tmp_path):
    path = make_video(tmp_path / "in.mkv", 4, codec="mpeg4", audio="mono")
    data = path.read_bytes()
    at = data.find(b"Lavf")
    path.write_bytes(data[:at] + b"\xe9\xe8vf" + data[at + 4 :])
    assert copy(open_clip(path), tmp_path / "out.mp4").info.audio


@pytest.mark.parametrize("size", [(64, 64), (1280, 720)])
def test_webp_has_the_colours_that_every_reader_expects(tmp_path, size):
    image = torch.tensor([230, 51, 0]).float().div(255)[None, :, None, None].expand(1, 3, size[1], size[0])
    with VideoWriter(
        tmp_path / "v.webp", size, Fraction(24), output=OutputFormat("webp"), tags=ColorTags(1, full=True)
    ) as w:
        w.write(image, [Fraction(0)])
    with Image.open(tmp_path / "v.webp") as picture:
        pixel = picture.convert("RGB").getpixel((20, 20))
    assert np.abs(np.array(pixel) - [230, 51, 0]).max() < 8


def test_folder_of_pictures_takes_any_name_but_no_one_s_files(tmp_path):
    with VideoWriter(tmp_path / "clip.v2", (64, 64), Fraction(24), output=OutputFormat("png")) as writer:
        writer.write(torch.rand(2, 3, 64, 64), [Fraction(0), Fraction(1, 24)])
    check_writable(tmp_path / "clip.v2", OutputFormat("png"))
    (tmp_path / "clip.v2" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        check_writable(tmp_path / "clip.v2", OutputFormat("png"))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["h264", "ffv1", "prores4444", "gif"])
@pytest.mark.parametrize("deep", [False, True])
def test_frames_on_a_gpu_are_written_as_from_the_processor(tmp_path, codec, deep):
    if deep and codec == "gif":
        pytest.skip("gif has no 10-bit form")
    frames, made = torch.rand(3, 3, 65, 97), []
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}{OutputFormat(codec).suffix}"
        with VideoWriter(path, (97, 65), Fraction(24), output=OutputFormat(codec, deep=deep)) as writer:
            writer.write(frames.to(device), [Fraction(i, 24) for i in range(3)])
        made.append(torch.stack([f.image for f in open_clip(path).frames()]))
    assert (made[0] - made[1]).abs().mean() < 1e-3
