"""Adapters against PEFT and diffusers on the same files; swaps; refusals."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError, ModelError
from comfyui_veostyle.veo_core.lora.formats import read_adapters
from comfyui_veostyle.veo_core.lora.injector import injected, load_lora
from comfyui_veostyle.veo_core.lora.names import ldm_unet_name
from comfyui_veostyle.veo_core.options import StylizeOptions
from safetensors.torch import load_file, save_file

from . import tiny
from .test_stable_diffusion import run, words

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "ff.net.2", "time_emb_proj"]


def inputs(unet):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    context = torch.randn(2, 7, unet.config.cross_attention_dim, generator=generator)
    extra = {}
    if unet.config.addition_embed_type:
        extra = {
            "added_cond_kwargs": {"text_embeds": torch.randn(2, 64, generator=generator), "time_ids": torch.ones(2, 6)}
        }
    return {"sample": x, "timestep": 500, "encoder_hidden_states": context, **extra}


def forward(unet):
    with torch.no_grad():
        return unet(**inputs(unet)).sample


def parts_of(made):
    return {"unet": made.unet} | {f"text {i + 1}": m for i, m in enumerate(made.text)}


def with_peft(made, config, folder):
    """A random adapter of PEFT's own making: its folder and the output with it."""
    import peft

    unet = tiny.parts(made.architecture).unet
    model = peft.get_peft_model(unet, config)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if p.requires_grad and "magnitude" not in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.1
        elif "magnitude" in name:
            p.data = p.data * 1.3
    model.save_pretrained(folder)
    model.eval()
    return folder, forward(model.base_model.model)


def lora(**more):
    import peft

    return peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False, **more)


def configs():
    import peft

    targets = {"target_modules": ["to_q", "to_v", "conv1", "ff.net.2"], "init_weights": False}
    return {
        "lora": lora(),
        "rank-stabilised": lora(use_rslora=True),
        "dora": lora(use_dora=True),
        "patterns": lora(rank_pattern={"to_q": 2}, alpha_pattern={"to_q": 5}),
        "loha": peft.LoHaConfig(r=4, alpha=2, **targets),
        "loha-tucker": peft.LoHaConfig(r=4, alpha=2, use_effective_conv2d=True, **targets),
        "lokr": peft.LoKrConfig(r=4, alpha=2, **targets),
        "lokr-both": peft.LoKrConfig(r=2, alpha=2, decompose_both=True, decompose_factor=4, **targets),
        "lokr-tucker": peft.LoKrConfig(r=2, alpha=2, use_effective_conv2d=True, decompose_factor=4, **targets),
    }


@pytest.mark.parametrize(
    "kind", ["lora", "rank-stabilised", "dora", "patterns", "loha", "loha-tucker", "lokr", "lokr-both", "lokr-tucker"]
)
@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_agrees_with_peft(kind, architecture, tmp_path):
    made = tiny.parts(architecture)
    base = forward(made.unet)
    folder, expected = with_peft(made, configs()[kind], tmp_path / "peft")
    loaded = load_lora(folder, parts_of(made), "SD 1.5")
    assert not loaded.unmatched
    assert not loaded.file.unread
    with injected(made.unet, "unet", (loaded,)):
        ours = forward(made.unet)
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - base).abs().max() > 1e-3
    assert torch.equal(forward(made.unet), base)


def to_kohya(folder, unet, ldm, alpha):
    out = {}
    for name, value in load_file(folder / "adapter_model.safetensors").items():
        layer, rest = re.match(r"base_model\.model\.(.+?)\.(lora_[AB]\.weight|lora_magnitude_vector)", name).groups()
        layer = (ldm_unet_name(layer, unet) if ldm else layer).replace(".", "_")
        ending = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}.get(rest, "dora_scale")
        out[f"lora_unet_{layer}.{ending}"] = value.reshape(-1, 1) if ending == "dora_scale" else value
        if ending == "lora_down.weight":
            out[f"lora_unet_{layer}.alpha"] = torch.tensor(float(alpha))
    return {k: v.contiguous() for k, v in out.items()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("architecture", "ldm"), [("sd15", False), ("sd15", True), ("sdxl", False), ("sdxl", True)])
def test_kohya_names(architecture, ldm, dora, tmp_path):
    made = tiny.parts(architecture)
    folder, expected = with_peft(made, lora(use_dora=dora), tmp_path / "peft")
    save_file(to_kohya(folder, made.unet, ldm, 6), tmp_path / "k.safetensors")
    loaded = load_lora(tmp_path / "k.safetensors", parts_of(made), "x")
    assert not loaded.unmatched
    with injected(made.unet, "unet", (loaded,)):
        assert (forward(made.unet) - expected).abs().max() < 1e-4


def test_diffusers_reads_our_kohya_file_to_the_same_picture(tmp_path):
    """The judge is diffusers' own loader, text encoder included."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    made, fresh = tiny.parts(), tiny.parts()
    generator = torch.Generator().manual_seed(2)
    file = {}
    for prefix, model, wanted in (
        ("lora_unet_", made.unet, "attn2.to_"),
        ("lora_te_text_model_", made.text[0], "self_attn"),
    ):
        for name, module in model.named_modules():
            if wanted in name and isinstance(module, torch.nn.Linear):
                key = prefix + name.removeprefix("text_model.").replace(".", "_")
                out, into = module.weight.shape
                file[f"{key}.lora_down.weight"] = torch.randn(3, into, generator=generator) * 0.2
                file[f"{key}.lora_up.weight"] = torch.randn(out, 3, generator=generator) * 0.2
                file[f"{key}.alpha"] = torch.tensor(2.0)
    save_file(file, tmp_path / "k.safetensors")
    pipeline = StableDiffusionPipeline(
        vae=fresh.vae, text_encoder=fresh.text[0], tokenizer=None, unet=fresh.unet, safety_checker=None,
        scheduler=DDIMScheduler.from_config(fresh.scheduler), feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.load_lora_weights(tmp_path / "k.safetensors")
    loaded = load_lora(tmp_path / "k.safetensors", parts_of(made), "SD 1.5")
    assert "8 in text 1" in loaded.report
    ids = torch.randint(0, 1000, (1, 77), generator=generator)
    with injected(made.unet, "unet", (loaded,)), injected(made.text[0], "text 1", (loaded,)), torch.no_grad():
        assert (forward(made.unet) - forward(pipeline.unet)).abs().max() < 1e-4
        ours, theirs = made.text[0](ids).last_hidden_state, pipeline.text_encoder(ids).last_hidden_state
        assert (ours - theirs).abs().max() < 1e-4
    assert not torch.allclose(made.text[0](ids).last_hidden_state, theirs, atol=1e-3)


def test_diffusers_format(tmp_path):
    import peft
    from diffusers import StableDiffusionPipeline

    made = tiny.parts()
    unet = tiny.parts().unet
    config = lora(use_rslora=True)
    unet.add_adapter(config)
    for p in unet.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    state = peft.get_peft_model_state_dict(unet)
    StableDiffusionPipeline.save_lora_weights(
        tmp_path, unet_lora_layers=state, unet_lora_adapter_metadata=config.to_dict()
    )
    loaded = load_lora(tmp_path / "pytorch_lora_weights.safetensors", parts_of(made), "SD 1.5")
    with injected(made.unet, "unet", (loaded,)):
        assert (forward(made.unet) - forward(unet)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_files_of_any_precision(dtype, tmp_path):
    made = tiny.parts()
    folder, expected = with_peft(made, lora(), tmp_path / "peft")
    file = {k: v.to(dtype) if v.ndim else v for k, v in to_kohya(folder, made.unet, False, 6).items()}
    save_file(file, tmp_path / "k.safetensors")
    base = forward(made.unet)
    with injected(made.unet, "unet", (load_lora(tmp_path / "k.safetensors", parts_of(made), "x"),)):
        ours = forward(made.unet)
    assert (ours - expected).norm() < 0.15 * (expected - base).norm()


def kohya_file(path, model, seed, wanted="attn1.to_q"):
    generator = torch.Generator().manual_seed(seed)
    file = {}
    for name, module in model.named_modules():
        if name.endswith(wanted):
            key = "lora_unet_" + name.replace(".", "_")
            file[f"{key}.lora_down.weight"] = torch.randn(2, module.weight.shape[1], generator=generator)
            file[f"{key}.lora_up.weight"] = torch.randn(module.weight.shape[0], 2, generator=generator)
    save_file(file, path)
    return path


def test_swapping_ten_times_leaves_the_base_bit_for_bit(tmp_path):
    model = tiny.backbone()
    weights = {k: v.clone() for k, v in model.unet.state_dict().items()}
    options, frames = StylizeOptions(strength=0, steps=3), 2
    base = run(model, words(), frames, options)
    files = [kohya_file(tmp_path / f"{i}.safetensors", model.unet, i) for i in range(2)]
    first = [run(model.with_lora(f), words(), frames, options) for f in files]
    for i in range(10):
        assert torch.equal(run(model.with_lora(files[i % 2]), words(), frames, options), first[i % 2])
    assert torch.equal(run(model, words(), frames, options), base)
    assert all(torch.equal(v, weights[k]) for k, v in model.unet.state_dict().items())
    both = run(model.with_lora(files[0]).with_lora(files[1], 0.5), words(), frames, options)
    assert not torch.allclose(both, first[0], atol=1e-3)
    assert torch.equal(run(model.with_lora(files[0], 0.0), words(), frames, options), base)


def test_strength_over_steps_and_scenes(tmp_path):
    model = tiny.backbone()
    file = kohya_file(tmp_path / "a.safetensors", model.unet, 0)
    options = StylizeOptions(strength=0, steps=6)
    lora = model.with_lora(file, 0.8, "0:1, 0.5:0.5, 1:0", "1, 0.25").loras[0]
    assert [lora.at(p, 0) for p in (0, 0.25, 0.5, 1)] == pytest.approx([0.8, 0.6, 0.4, 0])
    assert lora.at(0, 1) == lora.at(0, 7) == pytest.approx(0.2)
    full, early, off = (run(model.with_lora(file, 1.0, s), words(), 2, options) for s in ("", "0:1, 1:0", "0:0"))
    base = run(model, words(), 2, options)
    assert torch.equal(off, base)
    assert not torch.allclose(early, full, atol=1e-3)
    assert not torch.allclose(early, base, atol=1e-3)
    assert torch.equal(run(model.with_lora(file, 1.0, "", "0"), words(), 2, options), base)
    for wrong in ({"steps": "now"}, {"steps": "2:1"}, {"scenes": "x"}, {"strength": 99.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            model.with_lora(file, **wrong)
    assert len({model.digest, model.with_lora(file).digest, model.with_lora(file, 0.5).digest}) == 3


def flux_file(path):
    save_file({f"lora_unet_single_blocks_0_linear1.lora_{x}.weight": torch.ones(2, 2) for x in ("up", "down")}, path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.write_bytes(pickle.dumps({})), "pickle"),
        (lambda p: p.write_bytes(b"\x40" + bytes(99)), "not a whole safetensors"),
        (lambda p: save_file(tiny.ldm_checkpoint(tiny.parts()), p), "it is a checkpoint"),
        (lambda p: save_file({"decoder.conv_in.weight": torch.ones(1)}, p), "VAE"),
        (flux_file, "FLUX"),
        (lambda p: kohya_file(p, tiny.parts("sdxl").unet, 0, "attn2.to_k"), "is a LoRA for .* and the model is SD 1.5"),
        (
            lambda p: save_file(
                {f"lora_unet_x_attn2_to_k.lora_{x}.weight": torch.ones(2, 2048) for x in ("up", "down")}, p
            ),
            "LoRA for SDXL",
        ),
        (
            lambda p: save_file(
                {f"lora_unet_a.lora_{x}.weight": torch.full((2, 2), float("nan")) for x in ("up", "down")}, p
            ),
            "not finite",
        ),
    ],
)
def test_what_is_no_lora_for_this_model_is_refused(make, says, tmp_path):
    make(tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=says) as refused:
        tiny.backbone().with_lora(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(refused.value)


def test_missing_file_and_spoilt_metadata(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_adapters(tmp_path / "no.safetensors")
    made = tiny.parts()
    folder, _ = with_peft(made, lora(), tmp_path / "peft")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="metadata"):
        read_adapters(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    assert all(a.scale == 1 for a in read_adapters(folder).adapters.values())


def test_lokr_of_equal_factors_is_no_loha(tmp_path):
    made = tiny.parts()
    layer = next(n for n, m in made.unet.named_modules() if n.endswith("attn1.to_q") and m.weight.shape == (64, 64))
    key = "lora_unet_" + layer.replace(".", "_")
    parts = {f"{key}.lokr_w{n}_{ab}": torch.randn(*shape) for n in "12" for ab, shape in (("a", (8, 2)), ("b", (2, 8)))}
    save_file(parts | {f"{key}.alpha": torch.tensor(1.0)}, tmp_path / "k.safetensors")
    adapter = read_adapters(tmp_path / "k.safetensors").adapters[key]
    assert adapter.kind == "lokr"
    assert adapter.scale == 0.5
    expected = torch.kron(*(parts[f"{key}.lokr_w{n}_a"] @ parts[f"{key}.lokr_w{n}_b"] for n in "12")) * 0.5
    assert torch.allclose(adapter.delta(), expected, atol=1e-5)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_alpha_that_is_no_number_is_told(alpha, tmp_path):
    model = tiny.backbone()
    file = load_file(kohya_file(tmp_path / "a.safetensors", model.unet, 0))
    key = next(iter(file)).removesuffix(".lora_down.weight")
    save_file(file | {f"{key}.alpha": torch.tensor(alpha)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="alpha"):
        model.with_lora(tmp_path / "b.safetensors")


@pytest.mark.parametrize("kind", list(configs()))
def test_adapters_beside_eight_bit_weights(kind, tmp_path):
    """As beside the same weights widened, whatever the kind."""
    from comfyui_veostyle.veo_core.layers.fp8 import Fp8Linear, to_fp8, weight_of

    made = tiny.parts()
    folder, _ = with_peft(made, configs()[kind], tmp_path / "peft")
    wide = tiny.parts().unet
    to_fp8(made.unet)
    for name, layer in made.unet.named_modules():
        if isinstance(layer, Fp8Linear):
            wide.get_submodule(name).weight.data = weight_of(layer)
    outputs = []
    for unet in (made.unet, wide):
        with injected(unet, "unet", (load_lora(folder, {"unet": unet}, "SD 1.5"),)):
            outputs.append(forward(unet))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4


def test_adapters_of_unequal_ranks_add_up(tmp_path):
    """Together they do what each does to a linear layer, by their strengths, and one at 0 nothing."""
    unet, name = tiny.parts().unet, "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    layer = unet.get_submodule(name)
    x = torch.randn(3, 5, layer.in_features)
    plain = wanted = layer(x)
    loras = []
    for i, (rank, strength) in enumerate(((1, 0.5), (4, -2.0), (3, 0.0))):
        down, up = torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank)
        factors = {f"unet.{name}.lora_down.weight": down, f"unet.{name}.lora_up.weight": up}
        save_file(factors, tmp_path / f"{i}.safetensors")
        loras.append(load_lora(tmp_path / f"{i}.safetensors", {"unet": unet}, "SD 1.5", strength))
        wanted = wanted + strength * x @ down.T @ up.T
    with injected(unet, "unet", tuple(loras)) as strengths, torch.no_grad():
        torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-4)
        assert strengths.captured == (1.0, 1.0, 0.0)
        strengths.values = [0.0, 0.0, 0.0]
        assert torch.equal(layer(x), plain)
