"""Random Stable Diffusion models of under a million parameters, with the structure of the real ones."""

from __future__ import annotations

from pathlib import Path

import torch
from comfyui_veostyle.veo_core.backbones.stable_diffusion.backbone import StableDiffusionBackbone
from comfyui_veostyle.veo_core.backbones.stable_diffusion.files import Parts
from comfyui_veostyle.veo_core.lora.names import ldm_unet_name
from safetensors.torch import save_file

SCHEDULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "timestep_spacing": "leading",
}  # fmt: skip


def _randomise(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=generator) * p[0].numel() ** -0.5
        elif name.endswith(("bias", "class_embedding")):
            p.data = torch.randn(p.shape, generator=generator) * 0.02
    return module.eval().requires_grad_(False)


def text_model(width, seed, projection=False, act="quick_gelu", layers=2):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    config = CLIPTextConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64),
        hidden_act=act, projection_dim=width,
    )  # fmt: skip
    return _randomise(kind(config), seed)


def parts(architecture="sd15", seed=0, **scheduler) -> Parts:
    """Networks with the real ones' blocks, and widths of 32 and 64."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    if architecture == "sd15":
        unet = UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 32, 64, 64), cross_attention_dim=64, attention_head_dim=8
        )
        text = [text_model(64, seed + 2)]
    else:
        unet = UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64, 128), cross_attention_dim=128, attention_head_dim=[1, 1, 2],
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10], use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=64 + 6 * 256,
        )  # fmt: skip
        text = [text_model(64, seed + 2), text_model(64, seed + 3, True, "gelu")]
    vae = AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), layers_per_block=2, scaling_factor=0.18215,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    return Parts(architecture, _randomise(unet, seed), _randomise(vae, seed + 1), text, SCHEDULER | scheduler)


def backbone(architecture="sd15", seed=0, sampler="ddim", scheduler="normal", **schedule):
    return StableDiffusionBackbone(parts(architecture, seed, **schedule), f"tiny{seed}", sampler, scheduler)


def ldm_checkpoint(made: Parts) -> dict[str, torch.Tensor]:
    """The same weights under the names of a single-file checkpoint."""
    out = {}
    for key, value in made.unet.state_dict().items():
        name, kind = key.rsplit(".", 1)
        out[f"model.diffusion_model.{ldm_unet_name(name, made.unet)}.{kind}"] = value
    out |= {f"first_stage_model.{_ldm_vae_name(k)}": v for k, v in _vae_state(made.vae)}
    first = "cond_stage_model." if made.architecture == "sd15" else "conditioner.embedders.0."
    out |= {
        f"{first}transformer.text_model.{k.removeprefix('text_model.')}": v
        for k, v in made.text[0].state_dict().items()
    }
    if made.architecture == "sdxl":
        out |= {f"conditioner.embedders.1.model.{k}": v for k, v in open_clip_text(made.text[1].state_dict()).items()}
    return {k: v.contiguous().clone() for k, v in out.items()}


def save_checkpoint(made: Parts, path: Path) -> Path:
    save_file(ldm_checkpoint(made), path)
    return path


def save_folder(made: Parts, folder: Path) -> Path:
    """As diffusers saves a pipeline."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline

    scheduler = DDIMScheduler.from_config(made.scheduler)
    common = {
        "vae": made.vae,
        "unet": made.unet,
        "scheduler": scheduler,
        "text_encoder": made.text[0],
        "tokenizer": None,
    }
    if made.architecture == "sd15":
        extra = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        StableDiffusionPipeline(**common, **extra).save_pretrained(folder)
    else:
        StableDiffusionXLPipeline(**common, text_encoder_2=made.text[1], tokenizer_2=None).save_pretrained(folder)
    return folder


def _vae_state(vae):
    for key, value in vae.state_dict().items():
        is_attention = ".attentions." in key and value.ndim == 2
        yield key, value[:, :, None, None] if is_attention else value


def _ldm_vae_name(key):
    import re

    key = re.sub(r"encoder\.down_blocks\.(\d)\.resnets\.(\d)", r"encoder.down.\1.block.\2", key)
    key = re.sub(r"encoder\.down_blocks\.(\d)\.downsamplers\.0", r"encoder.down.\1.downsample", key)
    key = re.sub(r"decoder\.up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"decoder.up.{3 - int(m[1])}.block.{m[2]}", key)
    key = re.sub(r"decoder\.up_blocks\.(\d)\.upsamplers\.0", lambda m: f"decoder.up.{3 - int(m[1])}.upsample", key)
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    key = key.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
    for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
        key = key.replace(f"mid_block.attentions.0.{ours}", f"mid.attn_1.{theirs}")
    return key.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def open_clip_text(state):
    """A transformers text encoder's weights under open_clip's names."""
    state = {k.removeprefix("text_model."): v for k, v in state.items()}
    out = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "text_projection": state["text_projection.weight"].T,
    }
    layers = {k.split(".")[2] for k in state if k.startswith("encoder.layers.")}
    for i in layers:
        old, new = f"encoder.layers.{i}.", f"transformer.resblocks.{i}."
        for kind in ("weight", "bias"):
            qkv = [state[f"{old}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            out[f"{new}attn.in_proj_{kind}"] = torch.cat(qkv)
            for a, b in (
                ("self_attn.out_proj", "attn.out_proj"), ("layer_norm1", "ln_1"), ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
            ):  # fmt: skip
                out[f"{new}{b}.{kind}"] = state[f"{old}{a}.{kind}"]
    return out
