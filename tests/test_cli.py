"""The command line: what it makes, what it says, and how it exits."""

import sys

import pytest
import torch
from comfyui_veostyle.veo_core import cli
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.writer import VideoWriter
from PIL import Image

from .conftest import EXAMPLES, make_pictures, make_video


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["veostyle", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return code, out.out, " ".join(out.err.split())


@pytest.fixture
def video(tmp_path):
    return make_video(tmp_path / "in.mp4", 6, size=(96, 64), audio="stereo", picture=make_pictures(6, (96, 64)))


def test_stylize_with_the_documents_flags(monkeypatch, capsys, video, tmp_path):
    flags = ("--num_inference_steps", 2, "--guidance_scale", 1.5, "--style_image", EXAMPLES / "van_gogh.jpg")
    code, _, err = run(
        monkeypatch, capsys, "stylize", "--video_path", video, "--output_dir", tmp_path / "out", *flags,
        "--style_image", EXAMPLES / "great_wave.jpg", "--style_weight", 2, "--style_weight", 1,
    )  # fmt: skip
    assert code == 0, err
    result = open_clip(tmp_path / "out" / "in_van_gogh.mp4")
    assert len(list(result.frames())) == 6
    assert result.info.audio
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["in_van_gogh.mp4"]
    assert "6 frames" in err


def test_plan_and_doctor(monkeypatch, capsys, video):
    code, out, _ = run(monkeypatch, capsys, "plan", "--video_path", video)
    assert code == 0
    assert "peak" in out
    code, lean, _ = run(monkeypatch, capsys, "plan", "--video_path", video, "--memory_policy", "lean")
    assert code == 0
    assert "decodes 1 frames" in lean
    code, _, told = run(monkeypatch, capsys, "plan", "--video_path", video, "--memory_policy", "mean")
    assert code == 2
    assert "memory_policy = mean" in told
    code, out, _ = run(monkeypatch, capsys, "doctor")
    assert code == 0
    assert "veo-mini" in out


def measured(monkeypatch, capsys, result, source):
    code, out, _ = run(monkeypatch, capsys, "metrics", "--result", result, "--source", source)
    assert code == 0
    rows = [line.split("│") for line in out.splitlines() if line.count("│") > 3]
    return {row[1].strip(): float(row[2]) for row in rows if any(c.isdigit() for c in row[2])}


def test_metrics_tell_a_blur_from_steadiness(monkeypatch, capsys, video):
    clip, soft = open_clip(video), video.with_name("soft.mp4")
    with VideoWriter(soft, clip.size, clip.nominal_rate) as writer:
        for frame in clip.frames():
            blurred = torch.nn.functional.avg_pool2d(frame.image[None], 9, 1, 4, count_include_pad=False)
            writer.write(blurred, [frame.time])
    same, blur = (measured(monkeypatch, capsys, path, video) for path in (video, soft))
    assert same["ssim"] == pytest.approx(1)
    assert same["difference"] == 0
    assert blur["detail_share"] < 0.8 * same["detail_share"]
    assert blur["ssim"] < 0.99


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--video_path": "gone.mp4"}, "gone.mp4 does not exist"),
        ({"--style_image": "gone.jpg"}, "gone.jpg does not exist"),
        ({"--strength": 7}, "strength = 7"),
        ({"--codec": "divx"}, "codec = divx is unknown"),
        ({"--start": 99}, "past the end"),
        ({"--memory_gb": 0.01}, "smallest that works"),
        ({"--memory_gb": -1}, "memory_gb = -1"),
        ({"--model": "gone.safetensors"}, "gone.safetensors does not exist"),
        ({"--device": "abacus"}, "device = abacus"),
        ({"--paint": 1}, "--paint"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, video, tmp_path, change, says):
    arguments = {
        "--video_path": video,
        "--style_image": EXAMPLES / "van_gogh.jpg",
        "--output_dir": tmp_path / "out",
    } | change
    code, out, err = run(monkeypatch, capsys, "stylize", *[x for pair in arguments.items() for x in pair])
    assert code == 2
    assert says in err
    assert "Traceback" not in err + out
    assert not list((tmp_path / "out").glob("*.mp4")) if (tmp_path / "out").exists() else True


def test_output_folder_that_cannot_be_made(monkeypatch, capsys, video, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(
        monkeypatch, capsys, "stylize", "--video_path", video,
        "--style_image", EXAMPLES / "van_gogh.jpg", "--output_dir", tmp_path / "file" / "out",
    )  # fmt: skip
    assert code == 2
    assert "output_dir" in err


def test_style_pictures_that_cannot_be_used(monkeypatch, capsys, video, tmp_path):
    bomb, empty, text = tmp_path / "bomb.png", tmp_path / "empty.png", tmp_path / "text.png"
    Image.new("1", (20000, 20000)).save(bomb)
    empty.write_bytes(b"")
    text.write_text("not a picture")
    for path, says in ((bomb, "too large|more than"), (empty, "is empty"), (text, "not a picture")):
        code, _, err = run(
            monkeypatch, capsys, "stylize", "--video_path", video, "--style_image", path, "--output_dir", tmp_path
        )
        assert code == 2
        assert str(path) in err
        assert any(s in err for s in says.split("|")), err


def test_debug_shows_the_traceback(monkeypatch, capsys, tmp_path):
    with pytest.raises(Exception, match="does not exist"):
        monkeypatch.setattr(sys, "argv", ["veostyle", "plan", "--video_path", "gone.mp4", "--debug"])
        cli.main()


def test_interruption_is_not_success(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("comfyui_veostyle.veo_core.doctor.findings", interrupted)
    code, _, err = run(monkeypatch, capsys, "doctor")
    assert code == 130
    assert "again" in err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from . import tiny
    from .test_lora import kohya_file

    folder = tmp_path_factory.mktemp("models")
    made = tiny.parts()
    tiny.save_checkpoint(made, folder / "mine.safetensors")
    kohya_file(folder / "a.safetensors", made.unet, 0)
    return folder


def test_a_checkpoint_with_words_and_lora(monkeypatch, capsys, checkpoint, tmp_path):
    video = make_video(tmp_path / "in.mp4", 5, size=(64, 64))
    code, _, err = run(
        monkeypatch, capsys, "stylize", "--video_path", video, "--style_text", "a painted house", "--negative_text", "blurry",
        "--output_dir", tmp_path / "out", "--model", checkpoint / "mine.safetensors", "--lora",
        f"{checkpoint / 'a.safetensors'}:0.7", "--num_inference_steps", 4, "--guidance_scale", 3, "--denoise", 0.6,
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert "in unet" in err
    assert len(list(open_clip(tmp_path / "out" / "in_text.mp4").frames())) == 5


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ((), "no style was given"),
        (("--style_text", "a house"), "veo-mini reads pictures only"),
        (("--style_text", "a house", "--lora", "x.safetensors"), "takes no LoRA"),
        (("--style_text", "@soon a house"), "@soon"),
        (("--style_text", "a house", "--preset", "wild"), "preset = 'wild'"),
        (("--style_text", "a house", "--sampler", "euler"), "sampler is for Stable Diffusion"),
        (("--style_text", "a house", "--ip_adapter", "x"), "the two go together"),
        (("--style_text", "a house", "--model", "CHECKPOINT", "--sampler", "psychic"), "sampler = 'psychic'"),
        (("--style_text", "a house\n@scene 7 night", "--model", "CHECKPOINT"), "@scene 7: the clip has 1"),
        (("--style_text", "a house\n@99 night", "--model", "CHECKPOINT"), "@99: the clip has 5 frames"),
    ],
)
def test_mistakes_with_words_and_models_are_one_line(monkeypatch, capsys, extra, says, checkpoint, tmp_path):
    video = make_video(tmp_path / "in.mp4", 5, size=(64, 64))
    extra = [checkpoint / "mine.safetensors" if e == "CHECKPOINT" else e for e in extra]
    code, _, err = run(
        monkeypatch,
        capsys,
        "stylize",
        "--video_path",
        video,
        "--output_dir",
        tmp_path / "out",
        "--device",
        "cpu",
        *extra,
    )
    assert code == 2
    assert says in err
    assert not list((tmp_path / "out").glob("*.mp4"))
