"""Checkpoint files and folders to models, without a network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...errors import ModelError
from ...weights_file import Header, describe, read_header, read_metadata, read_tensors

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel

Architecture = Literal["sd15", "sdxl"]
NAMES: dict[str, str] = {"sd15": "SD 1.5", "sdxl": "SDXL"}
EXPECTED = "an SD 1.5 or SDXL checkpoint (one safetensors file, or a folder of diffusers)"
_UNET, _VAE = "model.diffusion_model.", "first_stage_model."


@dataclass
class Parts:
    """The networks of a checkpoint.

    Attributes:
        text: transformers' text encoders, one for SD 1.5, two for SDXL.
        scheduler: the noise schedule as diffusers' scheduler_config.json has it.
    """

    architecture: Architecture
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text: list[nn.Module]
    scheduler: dict[str, Any]


def detect(header: Header) -> Architecture | None:
    """The architecture of a single-file checkpoint, told by its keys alone; nothing is loaded. No false negatives."""
    if f"{_UNET}input_blocks.0.0.weight" not in header:
        return None
    return "sdxl" if f"{_UNET}label_emb.0.0.weight" in header else "sd15"


def detect_folder(folder: Path) -> Architecture | None:
    """The architecture of a diffusers folder, told by its model_index.json."""
    try:
        parts = json.loads((folder / "model_index.json").read_text())
        unet, second = parts.get("unet"), parts.get("text_encoder_2")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(unet, list) or unet[-1] not in ("UNet2DConditionModel", "UNetMotionModel"):
        return None
    return "sdxl" if isinstance(second, list) and second[-1] else "sd15"


def load_file(path: Path, dtype: torch.dtype) -> Parts:
    """A single-file checkpoint, its networks on the CPU.

    Widths are read off the weights, the rest is the architecture's; v-prediction is told by the marker key that such
    files carry.

    Raises:
        ModelError: it is not an SD 1.5 or SDXL checkpoint, or lacks a part.
    """
    header = read_header(path, EXPECTED)
    architecture = detect(header)
    if architecture is None:
        raise ModelError(f"{path} is no checkpoint of SD 1.5 or SDXL: {describe(header)}. Give {EXPECTED}")
    _check_kind(path, header)
    config = json.loads((Path(__file__).parent / "configs" / f"{architecture}.json").read_text())
    scheduler = dict(config["scheduler"]) | _prediction(header, read_metadata(path))
    try:
        unet = _load_unet(read_tensors(path, _UNET, dtype), config["unet"])
        vae = _load_vae(read_tensors(path, _VAE, dtype), config["vae"])
        text = [_load_text(path, header, facts, dtype) for facts in config["text"]]
    except (SafetensorError, RuntimeError, KeyError, ValueError, IndexError) as e:
        reason = " ".join(line.strip() for line in str(e).splitlines()[:2])[:300]
        raise ModelError(
            f"{path} is damaged or not a plain {NAMES[architecture]} checkpoint; download it again, or give another ({reason})"
        ) from e
    return Parts(architecture, unet, vae, text, scheduler)


def _prediction(header: Header, metadata: dict[str, str]) -> dict[str, Any]:
    """What a file says of its prediction, by marker keys or by its metadata (modelspec, kohya's scripts)."""
    told = metadata.get("modelspec.predict_key") or metadata.get("modelspec.prediction_type") or ""
    by_kohya = metadata.get("ss_v_parameterization", "").lower() == "true"
    if not ("v_pred" in header or told.lower() in ("v", "v_prediction", "velocity") or by_kohya):
        return {}
    zero = "ztsnr" in header or metadata.get("ss_zero_terminal_snr", "").lower() == "true"
    return {"prediction_type": "v_prediction", "rescale_betas_zero_snr": zero}


def _check_kind(path: Path, header: Header) -> None:
    if any(name in header for name in ("edm_vpred.sigma_max", "edm_mean", "edm_std")):
        raise ModelError(
            f"{path} is an EDM checkpoint, such as CosXL or Playground 2.5, whose noise is another. Give {EXPECTED}"
        )
    if any(name.startswith("cond_stage_model.model.") for name in header):
        raise ModelError(f"{path} is a checkpoint of SD 2, which is not read. Give {EXPECTED}")
    if any(name.startswith("conditioner.embedders.0.model.") for name in header):
        raise ModelError(f"{path} is a checkpoint of the SDXL refiner. Give the base model")
    channels = header[f"{_UNET}input_blocks.0.0.weight"][1]
    if channels != 4:
        raise ModelError(f"{path} takes {channels} channels: an inpainting or edit model. Give a plain one, with 4")
    text = ("cond_stage_model.", "conditioner.embedders.")
    for part, prefixes in (("VAE", (_VAE,)), ("text encoder", text)):
        if not any(name.startswith(prefixes) for name in header):
            raise ModelError(f"{path} holds the UNet but no {part}; give a full checkpoint, or use ComfyUI's loaders")


def _load_unet(weights: dict[str, Tensor], config: dict[str, Any]) -> UNet2DConditionModel:
    from diffusers import UNet2DConditionModel
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    config = config | _unet_widths(weights, config)
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    unet.load_state_dict(convert_ldm_unet_checkpoint(weights, unet.config), assign=True)
    return unet


def _unet_widths(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's shapes say of its widths and heads."""
    blocks = len(config.get("block_out_channels", range(4)))
    per_level = 3
    widths = [weights[f"{_UNET}input_blocks.{1 + per_level * i}.0.out_layers.3.weight"].shape[0] for i in range(blocks)]
    fitted: dict[str, Any] = {"block_out_channels": widths}
    cross = [v.shape[-1] for k, v in weights.items() if k.endswith("attn2.to_k.weight")]
    fitted["cross_attention_dim"] = cross[0]
    label = weights.get(f"{_UNET}label_emb.0.0.weight")
    if label is not None:
        fitted["projection_class_embeddings_input_dim"] = label.shape[1]
        # SDXL's heads are 64 wide; diffusers calls their number attention_head_dim.
        fitted["attention_head_dim"] = [max(1, width // 64) for width in widths]
    return fitted


def _load_vae(weights: dict[str, Tensor], config: dict[str, Any]) -> AutoencoderKL:
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    blocks = len(config["block_out_channels"])
    widths = [weights[f"{_VAE}encoder.down.{i}.block.0.conv2.weight"].shape[0] for i in range(blocks)]
    with torch.device("meta"):
        vae = AutoencoderKL.from_config(config | {"block_out_channels": widths})
    vae.load_state_dict(convert_ldm_vae_checkpoint(weights, vae.config), assign=True)
    return vae


def _load_text(path: Path, header: Header, facts: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    prefix = facts["prefix"]
    hugging_face = prefix.endswith("text_model.")
    if hugging_face and not any(name.startswith(prefix) for name in header):
        # As the oldest files have it.
        prefix = prefix.removesuffix("text_model.")
    weights = read_tensors(path, prefix, dtype)
    layer = f"{prefix}encoder.layers." if hugging_face else f"{prefix}transformer.resblocks."
    first = f"{layer}0.mlp.fc1.weight" if hugging_face else f"{layer}0.mlp.c_fc.weight"
    inner, width = header[first]
    projection = header.get(f"{prefix}text_projection", (width, width))
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=len({n.removeprefix(layer).split(".")[0] for n in header if n.startswith(layer)}),
        num_attention_heads=max(1, width // facts["head_dim"]),
        hidden_act=facts["hidden_act"],
        projection_dim=projection[1],
    )
    model = (CLIPTextModelWithProjection if facts["projection"] else CLIPTextModel)(config)
    if hugging_face:
        weights = {"text_model." + k.removeprefix(prefix): v for k, v in weights.items()}
    else:
        weights = convert_open_clip_checkpoint(model, weights, prefix=prefix)
    if not hasattr(model, "text_model"):
        weights = {k.removeprefix("text_model."): v for k, v in weights.items()}
    missing, _ = model.load_state_dict(weights, strict=False)
    if missing := [m for m in missing if "position_ids" not in m]:
        raise KeyError(f"text encoder lacks {missing[0]}")
    return model.to(dtype)


def load_folder(folder: Path, dtype: torch.dtype) -> Parts:
    """A folder as diffusers saves a pipeline; safetensors only.

    Raises:
        ModelError: it is not one of SD 1.5 or SDXL, or a part is missing or damaged.
    """
    architecture = detect_folder(folder)
    if architecture is None:
        raise ModelError(f"{folder} is no diffusers folder of SD 1.5 or SDXL (model_index.json). Give {EXPECTED}")
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    kinds = {"text_encoder": CLIPTextModel} | (
        {"text_encoder_2": CLIPTextModelWithProjection} if architecture == "sdxl" else {}
    )
    for part in ("unet", "vae", *kinds):
        if not list((folder / part).glob("*.safetensors")):
            raise ModelError(f"{folder / part} holds no safetensors; give a folder saved with safe serialization")

    def settings(part: str) -> dict[str, Any]:
        names = [p.name for p in (folder / part).glob("*.safetensors")]
        variant = "fp16" if all(".fp16." in n or "-fp16" in n for n in names) else None
        return {"local_files_only": True, "use_safetensors": True, "variant": variant}

    try:
        unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=dtype, **settings("unet"))
        vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype, **settings("vae"))
        text = [kind.from_pretrained(folder / part, **settings(part)).to(dtype) for part, kind in kinds.items()]
        scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        if not isinstance(scheduler, dict):
            raise ValueError("scheduler_config.json is no table of settings")
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as e:
        raise ModelError(f"{folder} is damaged ({str(e).splitlines()[0]}); download it again") from e
    if unet.config.in_channels != 4:
        raise ModelError(
            f"{folder} takes {unet.config.in_channels} channels: an inpainting or edit model; give a plain one"
        )
    return Parts(architecture, unet, vae, text, scheduler)


def load_motion(path: Path, unet: UNet2DConditionModel) -> nn.Module:
    """An SD 1.5 UNet with the motion modules of AnimateDiff: a folder of diffusers, or a single safetensors file.

    Raises:
        ModelError: the modules are damaged, or of another base.
    """
    from diffusers import MotionAdapter, UNetMotionModel
    from diffusers.loaders.single_file_utils import convert_animatediff_checkpoint_to_diffusers

    try:
        if path.is_dir():
            adapter = MotionAdapter.from_pretrained(path, local_files_only=True, use_safetensors=True)
        else:
            header = read_header(path, "AnimateDiff motion modules for SD 1.5")
            if not any("motion_modules" in name for name in header):
                raise ModelError(f"{path} has no AnimateDiff motion modules: {describe(header)}")
            weights = convert_animatediff_checkpoint_to_diffusers(read_tensors(path, dtype=unet.dtype))
            lengths = [shape[1] for name, shape in header.items() if name.endswith("pos_encoder.pe")]
            adapter = MotionAdapter(
                block_out_channels=tuple(unet.config.block_out_channels),
                use_motion_mid_block=any(k.startswith("mid_block") for k in weights),
                motion_max_seq_length=lengths[0] if lengths else 32,
            )
            # Positions are sines that the modules make for themselves.
            missing, extra = adapter.load_state_dict(weights, strict=False)
            if missing := [m for m in (*missing, *extra) if not m.endswith(".pe")]:
                raise KeyError(f"{missing[0]} does not match")
        return UNetMotionModel.from_unet2d(unet, adapter.to(unet.dtype))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as e:
        raise ModelError(f"{path} does not fit as motion modules of SD 1.5 ({str(e).splitlines()[0]})") from e
