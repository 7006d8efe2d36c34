"""Training: data whose motion is exact, a loop that survives bad steps, teachers that compute what they should."""

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError, ModelError
from comfyui_veostyle.veo_core.motion.warp import warp
from comfyui_veostyle.veo_core.train.data import SIDE, exposure_and_noise, load_bank, random_crops, synthetic_clips
from comfyui_veostyle.veo_core.train.loop import TrainingLoop
from comfyui_veostyle.veo_core.train.losses import colour_loss, content_loss, flat_texture, style_loss
from comfyui_veostyle.veo_core.train.mini import parse_stages
from comfyui_veostyle.veo_core.train.teachers import VGG19, OnnxInterpreter, load_vgg19

from .conftest import EXAMPLES


@pytest.fixture(scope="module")
def bank():
    return load_bank([EXAMPLES / "great_wave.jpg", EXAMPLES / "van_gogh.jpg"], torch.device("cpu"))


def test_bank_and_crops(bank):
    assert bank.shape[1:] == (3, SIDE, SIDE)
    assert bank.dtype == torch.uint8
    crops = random_crops(bank, 64)
    assert crops.shape == (len(bank), 3, 64, 64)
    assert 0 <= crops.min() <= crops.max() <= 1
    with pytest.raises(InputError, match="no training pictures"):
        load_bank([], torch.device("cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_flow_of_synthetic_clips_is_exact(bank, seed):
    torch.manual_seed(seed)
    clips = synthetic_clips(bank, 3, 4, 96, top_speed=6.0)
    frames = clips.frames
    for reference, flow, visible in (
        (torch.cat([frames[:, :1], frames[:, :-1]], 1), clips.flow, clips.visible),
        (frames[:, :1].expand_as(frames), clips.anchor_flow, clips.anchor_visible),
    ):
        back = warp(reference.flatten(0, 1), flow.flatten(0, 1), "bicubic").unflatten(0, (3, 4))
        error = ((back - frames).abs() * visible).sum() / (3 * visible.sum())
        unmoved = ((reference - frames).abs() * visible).sum() / (3 * visible.sum())
        assert error < 0.015
        assert visible.mean() > 0.4
        assert error < unmoved or unmoved < 0.01
    assert clips.flow[:, 0].abs().max() < 1e-3


def test_noise_is_in_range(bank):
    frames = exposure_and_noise(torch.rand(2, 3, 3, 16, 16))
    assert 0 <= frames.min() <= frames.max() <= 1


def test_losses_are_zero_for_equals_and_see_differences():
    torch.manual_seed(0)
    net = VGG19()
    a, b = torch.rand(2, 3, 64, 64), torch.rand(2, 3, 64, 64) ** 3
    fa, fb = net(a), net(b)
    for loss in (style_loss, content_loss):
        assert loss(fa, fa) < 1e-6 < loss(fa, fb)
    assert colour_loss(a, a) < 1e-9 < colour_loss(a, b)
    flat = torch.full_like(a, 0.5)
    assert flat_texture(flat, flat, flat) == 0 < flat_texture(a, flat, flat)


def test_loop_learns_and_a_bad_step_changes_nothing():
    torch.manual_seed(0)
    layer, count = torch.nn.Linear(4, 1), 0

    def step():
        nonlocal count
        count += 1
        x = torch.randn(32, 4)
        loss = (layer(x) - x.sum(1, keepdim=True)).square().mean()
        return {"total": loss * float("nan") if count % 3 == 0 else loss}

    lines = []
    loop = TrainingLoop(step, [(layer, 0.05)], 2.0, torch.device("cpu"), decay=0.9, warm_up=5)
    loop.run("toy", lines.append)
    assert loop.skipped > 0
    assert all(p.isfinite().all() for p in layer.parameters())
    assert (layer.weight - 1).abs().max() < 0.1
    assert "done" in lines[-1]


def test_interpreter_runs_a_graph_like_onnx_says(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    weight = torch.randn(4, 3, 3, 3)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["m"]),
        helper.make_node("Sub", ["r", "m"], ["y"]),
    ]

    def save(path, nodes):
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w_"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, "a", "b"])],
            [numpy_helper.from_array(weight.numpy(), "w")],
        )
        onnx.save(helper.make_model(graph), path)

    save(tmp_path / "g.onnx", nodes)
    x = torch.randn(2, 3, 8, 8)
    wanted = torch.relu(torch.nn.functional.conv2d(x, weight, stride=2, padding=1))
    wanted = wanted - wanted.mean((2, 3), keepdim=True)
    assert torch.allclose(OnnxInterpreter(tmp_path / "g.onnx")(x), wanted, atol=1e-5)
    save(tmp_path / "h.onnx", [helper.make_node("Softmax", ["x"], ["y"])])
    with pytest.raises(ModelError, match="Softmax"):
        OnnxInterpreter(tmp_path / "h.onnx")


def test_stages_are_parsed():
    assert parse_stages("distil:170, style:2.5") == {"distil": 170.0, "style": 2.5}
    for bad in ("paint:3", "style", "style:x"):
        with pytest.raises(InputError, match="NAME:SECONDS"):
            parse_stages(bad)


def test_missing_vgg_is_named(tmp_path):
    with pytest.raises(ModelError, match="vgg.safetensors"):
        load_vgg19(tmp_path / "vgg.safetensors")
