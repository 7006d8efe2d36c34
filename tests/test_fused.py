"""Fused norms, FP8 layers and CUDA graphs of Stable Diffusion against the networks as diffusers makes them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from comfyui_veostyle.veo_core import cuda_graphs
from comfyui_veostyle.veo_core.backbones.stable_diffusion import backbone as stable_diffusion
from comfyui_veostyle.veo_core.backbones.stable_diffusion.fused import FusedGroupNorm, fuse
from comfyui_veostyle.veo_core.layers.fp8 import Fp8Linear
from comfyui_veostyle.veo_core.layers.st_norm import TemporalContext, calibrate
from comfyui_veostyle.veo_core.layers.style_session import NormSite, Site, StyleSession
from comfyui_veostyle.veo_core.options import StylizeOptions
from comfyui_veostyle.veo_core.style.encoder import Style
from comfyui_veostyle.veo_core.style.injection import StyleInjection
from torch import nn

from . import tiny
from .test_lora import kohya_file
from .test_stable_diffusion import moving, picture, run, words


def close(a, b):
    """In double precision, where what differs is the order of sums."""
    return float((a - b).norm() / b.norm()) < 1e-10


@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_fused_networks_are_diffusers_own(architecture):
    ours, theirs = tiny.parts(architecture), tiny.parts(architecture)
    for model in (ours.unet, ours.vae, theirs.unet, theirs.vae):
        model.double()
    names = [n for n, _ in theirs.unet.named_parameters()]
    for model in (ours.unet, ours.vae):
        fuse(model)
        fuse(model)
    assert [n for n, _ in ours.unet.named_parameters()] == names
    assert sum(isinstance(m, FusedGroupNorm) for m in ours.unet.modules()) > 10
    assert not any(type(m) is nn.GroupNorm for m in (*ours.unet.modules(), *ours.vae.modules()))
    x, context = torch.randn(3, 4, 8, 8).double(), torch.randn(3, 77, ours.unet.config.cross_attention_dim).double()
    extra = {}
    if ours.unet.config.addition_embed_type:
        extra = {"added_cond_kwargs": {"text_embeds": torch.randn(3, 64).double(), "time_ids": torch.ones(3, 6)}}
    with torch.no_grad():
        a, b = (p.unet(x, torch.tensor(400), encoder_hidden_states=context, **extra).sample for p in (ours, theirs))
        assert close(a, b)
        assert close(*(p.vae.decode(x).sample for p in (ours, theirs)))
        frames = torch.rand(2, 3, 64, 64).double()
        assert close(*(p.vae.encode(frames).latent_dist.mode() for p in (ours, theirs)))
        assert close(*(copy.deepcopy(p).unet(x, 400, context, **extra).sample for p in (ours, theirs)))


def test_motion_modules_on_a_fused_network():
    from diffusers import MotionAdapter, UNetMotionModel

    adapter = tiny._randomise(MotionAdapter(block_out_channels=(32, 32, 64, 64), motion_num_attention_heads=4), 3)
    theirs = UNetMotionModel.from_unet2d(tiny.parts().unet, adapter).double()
    ours = copy.deepcopy(theirs)
    fuse(ours)
    clip, context = torch.randn(1, 4, 5, 8, 8).double(), torch.randn(5, 77, theirs.config.cross_attention_dim).double()
    with torch.no_grad():
        assert close(*(m(clip, 400, context).sample for m in (ours, theirs)))


def test_a_dropped_model_is_gone_at_once():
    """No cycle holds weights until a collection comes by."""
    made = tiny.parts()
    fuse(made.unet)
    left = [weakref.ref(p) for p in made.unet.parameters()]
    gc.disable()
    try:
        del made
        assert not [r for r in left if r() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_a_norm_with_st_norm_is_both_after_one_another(mean, silu, added):
    torch.manual_seed(0)
    norm = nn.GroupNorm(4, 16)
    nn.init.normal_(norm.weight)
    h, e = torch.randn(5, 16, 6, 7) + mean, torch.randn(5, 16) if added else None
    session, temporal = StyleSession(StyleInjection(norm=0.6)), TemporalContext(5)
    fused = FusedGroupNorm(norm, silu)
    fused.site = NormSite(session, Site("a", 1.0))
    plain = norm(h if e is None else h + e[..., None, None])
    with torch.no_grad(), session.apply(0.5, temporal):
        wanted = calibrate(plain, TemporalContext(5), "a", 0.6)
        out = fused(h, e)
    torch.testing.assert_close(out, F.silu(wanted) if silu else wanted, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(out, F.silu(plain) if silu else plain, atol=1e-2)
    # Outside the block it is the plain norm.
    torch.testing.assert_close(fused(h, e), F.silu(plain) if silu else plain, atol=1e-4, rtol=1e-4)


def test_fp8_layers_keep_their_bits_when_moved_and_cast():
    layer = nn.Linear(32, 48)
    narrow = Fp8Linear(layer)
    before, scale = narrow.weight.view(torch.uint8).clone(), narrow.scale.clone()
    narrow.half().double()
    assert torch.equal(narrow.weight.view(torch.uint8), before)
    assert torch.equal(narrow.scale, scale)
    assert narrow.bias.dtype == narrow.compute_dtype == torch.float64


def test_calls_are_captured_after_two_and_by_what_they_read(monkeypatch):
    captured = []

    class Graph:
        def __init__(self, function, inputs):
            self.function, self.inputs, self.output, self.graph = (
                function,
                [x.clone() for x in inputs],
                torch.empty(()),
                self,
            )

        def replay(self):
            self.output.copy_(self.function(*self.inputs))

    def capture(self, function, inputs):
        captured.append(inputs[0].shape)
        return Graph(function, inputs)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_capture", capture)
    graphs = cuda_graphs.CudaGraphs()
    for i in range(5):
        assert graphs("a", lambda x: x.sum(), torch.full((3,), float(i))) == 3 * i
    assert captured == [(3,)]
    for i in range(3):
        graphs("a", lambda x: x.sum(), torch.full((4,), float(i)))
        graphs("b", lambda x: x.sum(), torch.full((3,), float(i)))
    assert sorted(captured) == [(3,), (3,), (4,)]


def test_only_the_current_device_is_captured_and_only_where_a_failure_can_be_undone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")

    def captured(device):
        return cuda_graphs.captures(torch.device(device))

    assert [captured(d) for d in ("cpu", "cuda:0", "cuda:1", "cuda")] == [False, False, True, True]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not captured("cuda:1")


@pytest.mark.gpu
@pytest.mark.parametrize("style", ["picture", "words", "plain"])
def test_replayed_steps_are_the_launched_ones(style, monkeypatch, tmp_path):
    """With adapters whose strengths change over the steps and pass 0, and another style after the capture."""
    model = tiny.backbone()
    model.module.to("cuda", torch.float16)
    model = model.with_lora(kohya_file(tmp_path / "a.safetensors", model.unet, 0), steps="0:1, 0.5:0, 1:0.5")
    content, options = (
        moving(5).cuda(),
        StylizeOptions(steps=12, guidance=4.0, strength=0.0 if style == "plain" else 1.0),
    )
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self)))
    pictures = [(picture(),), ((picture() + 0.3) % 1,)] if style == "picture" else [()]
    for given in pictures:
        chosen = Style(given, (1.0,) * len(given), prompts=words().prompts)
        results = []
        for bound in (-1, 1 << 40):
            monkeypatch.setattr(stable_diffusion, "LAUNCH_BOUND", bound)
            results.append(run(model, chosen, 5, options, content=content))
        assert (results[0] - results[1]).norm() <= 2e-3 * results[0].norm()
    assert bool(replays) == (style != "words")


@pytest.mark.gpu
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("fault", ["synchronises", "raises"])
def test_a_capture_that_fails_leaves_stream_random_numbers_and_memory_as_they_were(fault, again):
    """The first of an object, and one after a graph that shares its pool, which still runs."""

    def fails(x):
        y = x * torch.ones(1 << 20, device="cuda")
        if fault == "raises":
            raise ValueError("while it captures")
        return y * y.sum().item()

    graphs, x = cuda_graphs.CudaGraphs(), torch.ones(1, device="cuda")
    for i in range(4 if again else 0):
        assert graphs("good", lambda x: x + 1, x * i) == i + 1
    for _ in range(2):
        graphs("bad", lambda x: x * 2, x)
    torch.cuda.manual_seed(0)
    drawn = torch.randn(2, 3, device="cuda")
    torch.cuda.manual_seed(0)
    torch.cuda.empty_cache()
    stream, reserved = torch.cuda.current_stream(), torch.cuda.memory_reserved()
    with pytest.raises(Exception, match=r"(?i)captur"):
        graphs("bad", fails, x)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.randn(2, 3, device="cuda"), drawn)
    assert torch.empty(1 << 28, device="cuda").is_cuda
    torch.cuda.empty_cache()
    # A pool that is shared lives until its last graph goes.
    assert torch.cuda.memory_reserved() - reserved < (100 << 20 if again else 1)
    for i in range(4):
        assert graphs("good", lambda x: x + 1, x * i) == i + 1
