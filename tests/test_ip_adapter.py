"""CLIP's towers against transformers, IP-Adapters against diffusers, and what must be refused."""

from __future__ import annotations

import pytest
import torch
from comfyui_veostyle.veo_core.errors import ModelError
from comfyui_veostyle.veo_core.options import StylizeOptions
from comfyui_veostyle.veo_core.style.clip import load_image_tower, load_text_tower
from comfyui_veostyle.veo_core.style.encoder import Style
from safetensors.torch import save_file

from . import tiny
from .test_stable_diffusion import picture, run, words

OPTIONS = StylizeOptions(steps=6, injection=StylizeOptions().injection.model_copy(
    update={"attention": 0.0, "norm": 0.0, "latent_norm": 0.0, "start_adain": 0.0, "sources": ("self",)}
), strength=1.0)  # fmt: skip


FACE = ("ip_adapter.1.to_k_ip.weight", "image_proj.norm.weight")


def vision_model(width=64, projection=48, seed=7):
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3, num_attention_heads=max(1, width // 64),
        image_size=28, patch_size=7, projection_dim=projection, hidden_act="gelu",
    )  # fmt: skip
    return tiny._randomise(CLIPVisionModelWithProjection(config), seed)


def hf_state(model):
    """As files have it, whatever this transformers calls its modules."""
    state = {}
    for name, value in model.state_dict().items():
        projected = name.startswith(("visual_projection", "text_projection"))
        state[name if projected or name.startswith(("vision_model", "text_model")) else f"vision_model.{name}"] = value
    return {k: v.contiguous().clone() for k, v in state.items()}


@pytest.fixture
def tower_file(tmp_path):
    save_file(hf_state(vision_model()), tmp_path / "clip_vision.safetensors")
    return tmp_path / "clip_vision.safetensors"


def test_image_tower_sees_what_transformers_sees(tower_file):
    theirs, ours = vision_model(), load_image_tower(tower_file)
    batch = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        expected = theirs(batch, output_hidden_states=True)
    seen = ours.features(batch)
    assert (seen.pooled - expected.image_embeds).abs().max() < 1e-4
    assert (seen.hidden - expected.hidden_states[-2]).abs().max() < 1e-4
    assert ours([torch.rand(3, 50, 80), torch.rand(3, 28, 28)]).pooled.shape == (2, 48)
    own = {f"visual.{k}": v.contiguous() for k, v in ours.network.state_dict().items()}
    save_file(own, tower_file.parent / "own.safetensors")
    again = load_image_tower(tower_file.parent / "own.safetensors")
    assert torch.equal(again.features(batch).pooled, seen.pooled)


def test_text_tower_reads_what_transformers_reads(tmp_path):
    theirs = tiny.text_model(64, 3, projection=True, act="gelu")
    state = {k if k.startswith("text") else f"text_model.{k}": v.clone() for k, v in theirs.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    from open_clip.tokenizer import SimpleTokenizer

    ids = SimpleTokenizer()(["a cat", "two dogs by the sea"])
    with torch.no_grad():
        expected = theirs(ids).text_embeds
    assert (load_text_tower(tmp_path / "a.safetensors")(["a cat", "two dogs by the sea"]) - expected).abs().max() < 1e-4


def ip_adapter_file(path, unet, kind="plain", features=48, hidden=64):
    """Random weights in the layout of the published files."""
    generator = torch.Generator().manual_seed(9)
    cross = unet.config.cross_attention_dim

    def randn(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    if kind == "plain":
        state = {
            "image_proj.proj.weight": randn(4 * cross, features), "image_proj.proj.bias": randn(4 * cross) * 0,
            "image_proj.norm.weight": torch.ones(cross), "image_proj.norm.bias": torch.zeros(cross),
        }  # fmt: skip
    else:
        inner = 64
        state = {
            "image_proj.latents": randn(1, 5, inner), "image_proj.proj_in.weight": randn(inner, hidden),
            "image_proj.proj_in.bias": randn(inner) * 0, "image_proj.proj_out.weight": randn(cross, inner),
            "image_proj.proj_out.bias": randn(cross) * 0, "image_proj.norm_out.weight": torch.ones(cross),
            "image_proj.norm_out.bias": torch.zeros(cross),
        }  # fmt: skip
        for i in range(4):
            layer = f"image_proj.layers.{i}"
            for norm in ("0.norm1", "0.norm2", "1.0"):
                state |= {f"{layer}.{norm}.weight": torch.ones(inner), f"{layer}.{norm}.bias": torch.zeros(inner)}
            state |= {
                f"{layer}.0.to_q.weight": randn(64, inner), f"{layer}.0.to_kv.weight": randn(128, inner),
                f"{layer}.0.to_out.weight": randn(inner, 64), f"{layer}.1.1.weight": randn(4 * inner, inner),
                f"{layer}.1.3.weight": randn(inner, 4 * inner),
            }  # fmt: skip
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            out = unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0]
            for part in ("k", "v"):
                state[f"ip_adapter.{number}.to_{part}_ip.weight"] = randn(out, cross)
            number += 2
    save_file(state, path)
    return path


@pytest.mark.parametrize("kind", ["plain", "plus"])
@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_agrees_with_diffusers(architecture, kind, tower_file, tmp_path):
    """The UNet's output with an IP-Adapter, against the one that diffusers loaded."""
    from comfyui_veostyle.veo_core.backbones.stable_diffusion.ip_adapter import load_ip_adapter, pictured
    from safetensors.torch import load_file

    from .test_lora import inputs

    made, fresh = tiny.parts(architecture), tiny.parts(architecture)
    path = ip_adapter_file(tmp_path / "ip.safetensors", made.unet, kind)
    base = made.unet(**inputs(made.unet)).sample
    adapter = load_ip_adapter(path, tower_file, made.unet, architecture)
    tokens, nothing = adapter.tokens([picture(), picture(1)], [0.5, 0.5])
    singly = [adapter.tokens([picture(i)], [1.0])[0] for i in (0, 1)]
    assert torch.allclose(tokens, (singly[0] + singly[1]) / 2, atol=1e-5)
    assert (nothing - tokens).abs().max() > 1e-3
    state = {"image_proj": {}, "ip_adapter": {}}
    for k, v in load_file(path).items():
        part, name = k.split(".", 1)
        state[part][name] = v
    fresh.unet._load_ip_adapter_weights([state], low_cpu_mem_usage=False)
    for processor in fresh.unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.7]
    seen = adapter.tower([picture(), picture(1)])
    features = (seen.hidden if kind == "plus" else seen.pooled)[:1].repeat(2, *[1] * (2 if kind == "plus" else 1))
    given = inputs(fresh.unet)
    given["added_cond_kwargs"] = given.get("added_cond_kwargs", {}) | {"image_embeds": [features[:, None]]}
    expected = fresh.unet(**given).sample
    with pictured(made.unet, adapter, 0.7) as holder:
        holder.batch = adapter.tokens([picture()], [1.0])[0].expand(2, -1, -1)
        ours = made.unet(**inputs(made.unet)).sample
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - base).abs().max() > 1e-3
    assert torch.equal(made.unet(**inputs(made.unet)).sample, base)


def test_the_image_encoder_is_fp8_where_the_model_is(tower_file, tmp_path):
    from comfyui_veostyle.veo_core.backbones import load_backbone

    path = tiny.save_checkpoint(tiny.parts(), tmp_path / "a.safetensors")
    adapter = ip_adapter_file(tmp_path / "ip.safetensors", tiny.parts().unet)
    plain, narrow = (
        load_backbone(path, torch.device("cpu"), weight_dtype=w).with_ip_adapter(adapter, tower_file)
        for w in (None, "fp8_e4m3fn")
    )
    towers = [sum(p.nbytes for p in m.ip_adapter.tower.parameters()) for m in (plain, narrow)]
    assert towers[1] < 0.7 * towers[0]
    wanted, got = (m.ip_adapter.tokens([picture()], [1.0])[0] for m in (plain, narrow))
    assert 0 < (got - wanted).norm() / wanted.norm() < 0.1


def test_in_a_run(tower_file, tmp_path):
    model = tiny.backbone()
    path = ip_adapter_file(tmp_path / "ip.safetensors", model.unet)
    seen = Style((picture(),), (1.0,), prompts=words().prompts)
    adapted, styled = model.with_ip_adapter(path, tower_file), model.with_ip_adapter(path, tower_file, "style")
    base = run(model, seen, 2, OPTIONS)
    whole, part = run(adapted, seen, 2, OPTIONS), run(styled, seen, 2, OPTIONS)
    assert not torch.allclose(whole, base, atol=1e-3)
    assert not torch.allclose(part, base, atol=1e-4)
    assert not torch.allclose(part, whole, atol=1e-4)
    other = Style((picture(), picture(3)), (0.2, 0.8), prompts=words().prompts)
    assert not torch.allclose(run(adapted, other, 2, OPTIONS), whole, atol=1e-4)
    weak = Style((picture(),), (1.0,), 0.3, words().prompts)
    assert not torch.allclose(run(adapted, weak, 2, OPTIONS), whole, atol=1e-4)
    assert torch.equal(run(model, seen, 2, OPTIONS), base)
    plain = OPTIONS.model_copy(update={"strength": 0.0})
    assert torch.equal(run(adapted, seen, 2, plain), run(model, seen, 2, plain))
    assert len({model.digest, adapted.digest, styled.digest}) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p, u: ip_adapter_file(p, tiny.parts("sdxl").unet), "128 wide, and this one has 16, 64 wide"),
        (lambda p, u: ip_adapter_file(p, u, features=32), "takes image features of 32, and .* gives 48"),
        (lambda p, u: ip_adapter_file(p, u, "plus", hidden=32), "takes image features of 32, and .* gives 64"),
        (lambda p, u: save_file({"lora_unet_a.lora_up.weight": torch.ones(1)}, p), "it is a LoRA"),
        (lambda p, u: p.write_bytes(b"\x80\x04abc"), "pickle"),
        (lambda p, u: save_file({n: torch.ones(1) for n in FACE}, p), "another kind"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make, says, tower_file, tmp_path):
    model = tiny.backbone()
    make(tmp_path / "ip.safetensors", model.unet)
    with pytest.raises(ModelError, match=says):
        model.with_ip_adapter(tmp_path / "ip.safetensors", tower_file)


def test_towers_refuse_other_files_and_silent_downloads(tmp_path):
    save_file(tiny.ldm_checkpoint(tiny.parts()), tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="no image encoder: it is a checkpoint"):
        load_image_tower(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="no text encoder"):
        load_text_tower(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="downloaded, which is off"):
        load_image_tower("ViT-H-14:laion2b_s32b_b79k")
    with pytest.raises(ModelError, match="does not exist"):
        load_image_tower(tmp_path / "no.safetensors")


def test_clip_score(tmp_path):
    from comfyui_veostyle.veo_core.metrics.clip_score import clip_score
    from comfyui_veostyle.veo_core.video.reader import open_clip

    from .conftest import make_video

    save_file(hf_state(vision_model(projection=64)), tmp_path / "image.safetensors")
    text = tiny.text_model(64, 3, projection=True, act="gelu").state_dict()
    save_file(
        {k if k.startswith("text") else f"text_model.{k}": v.clone() for k, v in text.items()},
        tmp_path / "text.safetensors",
    )
    clip = open_clip(make_video(tmp_path / "a.mp4", 17, size=(64, 48)))
    towers = (tmp_path / "image.safetensors", tmp_path / "text.safetensors")
    score = clip_score(clip, "a cat", *towers)
    assert -100 <= score <= 100
    assert score != clip_score(clip, "two dogs", *towers)
    save_file(hf_state(vision_model(projection=48)), tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="towers of one CLIP"):
        clip_score(clip, "a cat", tmp_path / "other.safetensors", towers[1])
