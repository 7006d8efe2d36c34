"""What options say they do: fusion, knobs, words and seeds that a model does not read, weights of other kinds."""

import pytest
import torch
from comfyui_veostyle.veo_core.backbones import load_backbone
from comfyui_veostyle.veo_core.backbones.stable_diffusion.files import load_file
from comfyui_veostyle.veo_core.engine import Stylizer
from comfyui_veostyle.veo_core.errors import InputError, ModelError
from comfyui_veostyle.veo_core.layers.fp8 import Fp8Attention, to_fp8
from comfyui_veostyle.veo_core.layers.st_norm import TemporalContext
from comfyui_veostyle.veo_core.layers.style_session import NormSite, Site, StyleSession
from comfyui_veostyle.veo_core.motion.fusion import TemporalFusion
from comfyui_veostyle.veo_core.options import StylizeOptions, parse_fusion, parse_options
from comfyui_veostyle.veo_core.render import render
from comfyui_veostyle.veo_core.style.encoder import Style, load_style
from comfyui_veostyle.veo_core.style.prompts import parse_prompts
from comfyui_veostyle.veo_core.video.codecs import OutputFormat
from comfyui_veostyle.veo_core.video.reader import open_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from . import tiny
from .conftest import EXAMPLES, make_pictures, make_video
from .test_lora import kohya_file
from .test_stable_diffusion import picture

CPU = torch.device("cpu")


@pytest.fixture
def clip(tmp_path):
    return open_clip(make_video(tmp_path / "in.mp4", 6, size=(96, 64), picture=make_pictures(6, (96, 64))))


def decoded(engine, latents, **how):
    return torch.cat(list(engine.decode(latents, **how)))


def test_at_strength_zero_pixels_are_the_plain_model_s(engine, clip, style, tmp_path):
    latents = engine.denoise(clip, style, StylizeOptions(strength=0), tmp_path / "w")
    source = torch.stack([f.image for f in clip.frames()])
    plain = torch.cat([engine.backbone.decode(engine.backbone.encode(f[None])) for f in source]).clamp(0, 1)
    assert latents.fusion == 0
    assert (decoded(engine, latents) - plain).abs().max() < 1e-5
    latents.store.remove()


def test_fusion_is_a_choice_that_costs_no_new_run(engine, clip, style, tmp_path):
    latents = engine.denoise(clip, style, StylizeOptions(), tmp_path / "w")
    off, half, whole = (decoded(engine, latents, fusion=TemporalFusion(a)) for a in (0.0, 0.5, 1.0))
    assert latents.fusion == 1
    assert torch.equal(decoded(engine, latents), whole)
    alone = torch.cat([engine.backbone.decode(latents.store.read("latents", i, 1)) for i in range(6)]).clamp(0, 1)
    assert (off - alone).abs().max() < 1e-5
    apart = [(x - off).abs().mean() for x in (half, whole)]
    assert 1e-4 < apart[0] < apart[1]
    written = []
    for amount in (0.0, 1.0):
        render(engine, latents, tmp_path / "v.mkv", OutputFormat("ffv1"), fusion=amount)
        written.append(torch.stack([f.image for f in open_clip(tmp_path / "v.mkv").frames()]))
    assert (written[0] - off).abs().max() < 0.02
    assert (written[1] - whole).abs().max() < 0.02
    latents.store.close()
    again = engine.denoise(clip, style, StylizeOptions(), tmp_path / "w")
    assert again.store.resumed
    again.store.remove()


@settings(max_examples=20, deadline=None)
@given(amount=st.floats(0, 1), seed=st.integers(0, 99))
def test_fusion_is_continuous_in_its_amount(amount, seed):
    generator = torch.Generator().manual_seed(seed)
    frames = torch.rand(2, 1, 3, 32, 32, generator=generator)
    motion = torch.cat([torch.zeros(1, 2, 8, 8), torch.ones(1, 1, 8, 8)], 1)

    def second(amount):
        fusion = TemporalFusion(amount)
        fusion(frames[0], motion)
        return fusion(frames[1], motion)

    step = (second(min(1.0, amount + 0.01)) - second(amount)).abs().mean()
    assert step < 0.02
    assert torch.equal(second(0.0), frames[1])


@pytest.mark.parametrize(("given_", "means"), [("auto", None), ("off", 0.0), ("0.25", 0.25), (1, 1.0), (None, None)])
def test_fusion_is_given_in_words_or_numbers(given_, means):
    assert parse_fusion(given_) == means


@pytest.mark.parametrize("given_", ["on", "2", "-0.1", "nan", ""])
def test_other_fusion_is_named(given_):
    with pytest.raises(InputError, match="fusion = "):
        parse_fusion(given_)


def test_what_veo_mini_does_not_read_makes_no_other_run(engine, clip, style, tmp_path):
    runs = []
    for options in (
        StylizeOptions(),
        StylizeOptions(seed=7),
        parse_options(preset="strong", inversion=True, knobs="query=0.1", denoise=0.9),
    ):
        latents = engine.denoise(clip, style, options, tmp_path / "w")
        runs.append((latents.store.folder, latents.store.resumed))
        latents.store.close()
    assert len({folder for folder, _ in runs}) == 1
    assert [resumed for _, resumed in runs] == [False, True, True]
    other = engine.denoise(clip, style, StylizeOptions(steps=2), tmp_path / "w")
    assert not other.store.resumed
    other.store.close()


def test_words_beside_a_picture_get_a_notice(engine, clip, style, tmp_path):
    worded = load_style([EXAMPLES / "great_wave.jpg"], prompts=parse_prompts("an oil painting", ""))
    plain = engine.denoise(clip, style, StylizeOptions(), tmp_path / "w")
    plain.store.close()
    latents = engine.denoise(clip, worded, StylizeOptions(), tmp_path / "w")
    assert latents.store.resumed
    assert any("words are not used" in n for n in latents.notices)
    assert not plain.notices
    latents.store.remove()


@pytest.mark.parametrize(("words", "told"), [("", True), ("a painted house", False)])
def test_guidance_that_sets_nothing_against_nothing_is_told(engine, clip, tmp_path, words, told):
    model = Stylizer(tiny.backbone(), engine.flow)
    style = Style((picture(),), (1.0,), prompts=parse_prompts(words, ""))
    small = open_clip(clip.path, width=64, height=64, max_frames=2)
    latents = model.denoise(small, style, StylizeOptions(steps=2, guidance=5.0), tmp_path / "w")
    assert any("guidance = 5 is not used" in n for n in latents.notices) == told
    latents.store.remove()


@pytest.mark.parametrize(
    ("knobs", "depth", "progress", "acts"),
    [
        ({}, 0.9, 0.5, True),
        ({"layers": (0.5, 1.0)}, 0.1, 0.5, False),
        ({"steps": (0.0, 0.4)}, 0.9, 0.9, False),
        ({"layers": (0.5, 1.0), "steps": (0.0, 0.4)}, 0.9, 0.2, True),
    ],
)
def test_layers_and_steps_gate_norms_too(knobs, depth, progress, acts):
    session = StyleSession(StylizeOptions().injection.model_copy(update={"layers": (0.0, 1.0)} | knobs))
    site = Site("norm", depth)
    moments = torch.rand(3, 2, 8) + 1
    moments[:, 1] += moments[:, 0] ** 2
    with session.record_style([1.0]):
        session.calibration(site, moments[:1] * 2)
    with session.apply(progress, TemporalContext(3)):
        scale, shift = NormSite(session, site).calibration(moments)
    changes = (scale - 1).abs().max() + shift.abs().max()
    assert (changes > 1e-3) == acts


def test_an_image_encoder_in_fp8_takes_half_of_half_precision(tmp_path):
    from open_clip.transformer import VisionTransformer

    torch.manual_seed(0)
    tower = VisionTransformer(
        image_size=28, patch_size=14, width=256, layers=3, heads=4, mlp_ratio=4.0, output_dim=64
    ).eval()
    pictures = torch.randn(2, 3, 28, 28)
    wanted = tower(pictures)
    half = sum(p.numel() * 2 for p in tower.parameters())
    to_fp8(tower)
    assert any(isinstance(m, Fp8Attention) for m in tower.modules())
    narrow = sum(p.numel() * min(2, p.itemsize) for p in tower.parameters())
    assert narrow < 0.56 * half
    got = tower(pictures)
    assert 0 < (got - wanted).norm() / wanted.norm() < 0.08


def text_layers(prefix, layers=2, width=64):
    return {
        f"{prefix}{i}_self_attn_q_proj.{end}": torch.randn(*size) * 0.1
        for i in range(layers)
        for end, size in (("lora_down.weight", (2, width)), ("lora_up.weight", (width, 2)))
    }


def factors(name, inputs=64, outputs=64, rank=2):
    return {f"{name}.lora_down.weight": torch.randn(rank, inputs), f"{name}.lora_up.weight": torch.randn(outputs, rank)}


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([f"lora_unet_double_blocks_{i}_img_attn_qkv" for i in range(9)], "FLUX"),
        ([f"lora_unet_single_transformer_blocks_{i}_attn_to_q" for i in range(9)], "FLUX"),
        ([f"lora_unet_joint_blocks_{i}_x_block_attn_qkv" for i in range(9)], "SD 3"),
        (["lora_te2_text_model_encoder_layers_0_self_attn_q_proj"], "SDXL"),
    ],
)
def test_a_lora_that_shares_only_the_text_encoder_is_refused(tmp_path, others, says):
    file = text_layers("lora_te1_text_model_encoder_layers_")
    for name in others:
        file |= factors(name)
    save_file(file, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=rf"(?s)a LoRA for .*{says}.*the model is SD 1\.5"):
        tiny.backbone().with_lora(tmp_path / "a.safetensors")


def test_a_lora_of_the_text_encoder_alone_is_taken(tmp_path):
    save_file(text_layers("lora_te_text_model_encoder_layers_"), tmp_path / "a.safetensors")
    assert len(tiny.backbone().with_lora(tmp_path / "a.safetensors").loras[0].layers["text 1"]) == 2


@pytest.mark.parametrize(
    "rename",
    [
        lambda k: k.replace("lora_unet_", "lora_unet.", 1),
        lambda k: k.replace(".lora_down.", ".lora_A.style.").replace(".lora_up.", ".lora_B.style."),
    ],
)
def test_lora_names_with_dots_and_adapter_names(tmp_path, rename):
    from safetensors.torch import load_file as tensors

    model = tiny.backbone()
    path = kohya_file(tmp_path / "a.safetensors", model.unet, 0)
    plain = len(model.with_lora(path).loras[0].layers["unet"])
    save_file({rename(k): v for k, v in tensors(path).items()}, tmp_path / "b.safetensors")
    assert len(model.with_lora(tmp_path / "b.safetensors").loras[0].layers["unet"]) == plain > 4


def test_text_layers_as_comfyui_saves_them(tmp_path):
    name = "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj"
    save_file(factors(name), tmp_path / "a.safetensors")
    assert tiny.backbone().with_lora(tmp_path / "a.safetensors").loras[0].layers["text 1"]


def test_factors_that_do_not_fit_together_are_named(tmp_path):
    name = "lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file(
        {f"{name}.lora_down.weight": torch.randn(2, 64), f"{name}.lora_up.weight": torch.randn(64, 3)},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(ModelError, match="do not fit together"):
        tiny.backbone().with_lora(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("lora_unet_x.diff", "full difference"),
        ("lora_unet_x.oft_blocks", "OFT"),
        ("lora_unet_x.a1.weight", "GLoRA"),
        ("base_model.model.x.ia3_l", "IA3"),
        ("model_ema.diffusion_model.x", "EMA"),
        ("lora_unet_x.lora_down.weight", "of no layer are all parts there"),
    ],
)
def test_the_kind_of_an_adapter_that_is_not_read_is_named(tmp_path, key, says):
    save_file({key: torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=says):
        tiny.backbone().with_lora(tmp_path / "a.safetensors")


def saved(tmp_path, change, metadata=None):
    tensors = tiny.ldm_checkpoint(tiny.parts())
    change(tensors)
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    return tmp_path / "a.safetensors"


def scaled(tensors):
    """As scaled fp8 files have it: one scale a layer beside a weight in fp8."""
    for name in [n for n in tensors if n.endswith("attn1.to_q.weight")]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".scale_weight")] = scale.reshape(1)
        tensors[name.replace(".weight", ".scale_input")] = torch.ones(1)
    tensors["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)


def without_text_model(tensors):
    for name in [n for n in tensors if ".text_model." in n]:
        tensors[name.replace(".text_model.", ".")] = tensors.pop(name)


@pytest.mark.parametrize("change", [scaled, without_text_model])
def test_checkpoints_under_other_names_are_the_same_model(tmp_path, change):
    wanted, got = tiny.parts(), load_file(saved(tmp_path, change), torch.float32)
    for a, b in zip([wanted.unet, *wanted.text], [got.unet, *got.text], strict=True):
        found = {k.removeprefix("text_model."): v for k, v in b.state_dict().items()}
        for name, value in a.state_dict().items():
            apart = (found[name.removeprefix("text_model.")] - value).abs().max() / value.abs().max().clamp(min=1e-6)
            assert apart < (0.07 if "to_q" in name else 1e-6), name


@pytest.mark.parametrize("key", ["edm_vpred.sigma_max", "edm_mean"])
def test_edm_checkpoints_are_refused(tmp_path, key):
    path = saved(tmp_path, lambda t: t.__setitem__(key, torch.ones(1)))
    with pytest.raises(ModelError, match="EDM"):
        load_backbone(path, CPU)


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"modelspec.predict_key": "v"}, "v_prediction"),
        ({"modelspec.prediction_type": "v"}, "v_prediction"),
        ({"ss_v_parameterization": "True"}, "v_prediction"),
        ({"modelspec.predict_key": "epsilon"}, "epsilon"),
        (None, "epsilon"),
    ],
)
def test_prediction_by_metadata(tmp_path, metadata, kind):
    made = load_file(saved(tmp_path, lambda t: None, metadata), torch.float32)
    assert made.scheduler.get("prediction_type", "epsilon") == kind


def test_a_checkpoint_without_a_part_of_its_unet_is_one_line(tmp_path):
    def lacking(tensors):
        for name in [n for n in tensors if n.endswith("attn2.to_k.weight")]:
            del tensors[name]

    with pytest.raises(ModelError, match="damaged or not a plain"):
        load_backbone(saved(tmp_path, lacking), CPU)
