"""CLIP's image and text towers, by open_clip, from files that people have; nothing is downloaded unless allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..weights_file import Header, describe, read_header, read_tensors
from .encoder import cover

IMAGE = "a CLIP image encoder (safetensors, as in ComfyUI's clip_vision folder)"
TEXT = "a CLIP text encoder (safetensors, as in ComfyUI's text_encoders folder)"
# Heads by width where they are not 64 wide: ViT-H and ViT-bigG.
_HEADS = {1280: 16, 1664: 16}
# Widths of OpenAI's own models, whose activation is the quick GELU; OpenCLIP's have the plain one.
_QUICK = {"image": (768, 1024), "text": (512, 768)}


@dataclass(frozen=True)
class ImageFeatures:
    """What an image tower sees: ``pooled [n, D]`` and the last but one layer's tokens ``hidden [n, 1 + patches, width]``."""

    pooled: Tensor
    hidden: Tensor


class ImageTower(nn.Module):
    """open_clip's vision transformer with CLIP's way of preparing pictures."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    @torch.no_grad()
    def forward(self, pictures: list[Tensor]) -> ImageFeatures:
        """``[3, H, W]`` in 0..1 each, of any size: short side scaled to the tower's, the middle square taken."""
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

        side = self.network.image_size[0]
        weight = self.network.conv1.weight
        mean, std = (torch.tensor(v)[:, None, None] for v in (OPENAI_DATASET_MEAN, OPENAI_DATASET_STD))
        batch = torch.cat([(cover(p.cpu().float(), side, side) - mean) / std for p in pictures])
        return self.features(batch.to(weight))

    @torch.no_grad()
    def features(self, batch: Tensor) -> ImageFeatures:
        """For pictures prepared already ``[n, 3, side, side]``."""
        seen: list[Tensor] = []
        handle = self.network.transformer.resblocks[-2].register_forward_hook(lambda m, i, out: seen.append(out))
        try:
            pooled = self.network(batch)
        finally:
            handle.remove()
        return ImageFeatures(pooled, seen[0])


class TextTower(nn.Module):
    """open_clip's text transformer: texts to vectors in the image tower's space."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    @torch.no_grad()
    def forward(self, texts: list[str]) -> Tensor:
        """``[n, D]``; what is beyond 75 tokens is cut."""
        from open_clip.tokenizer import SimpleTokenizer

        encode = getattr(self.network, "encode_text", self.network)
        return encode(SimpleTokenizer()(texts).to(next(self.network.parameters()).device))


def load_image_tower(source: str | Path, download: bool = False) -> ImageTower:
    """An image tower from a file in open_clip's or Hugging Face's naming, or by open_clip's names when allowed.

    Args:
        source: a safetensors file; or ``ViT-H-14:laion2b_s32b_b79k``, which needs ``download``.

    Raises:
        ModelError: the file is something else, or a download would be needed and is not allowed.
    """
    if (named := _by_name(source, IMAGE, download)) is not None:
        return ImageTower(named.visual).eval().requires_grad_(False)
    from open_clip.transformer import VisionTransformer

    path = Path(source)
    header = read_header(path, IMAGE)
    state = _unified(path, header, "image")
    width, _, patch, _ = state["conv1.weight"].shape
    side = round((len(state["positional_embedding"]) - 1) ** 0.5) * patch
    network = VisionTransformer(
        image_size=side,
        patch_size=patch,
        output_dim=state["proj"].shape[1],
        mlp_ratio=_ratio(state, width),
        **_common(state, width, "image"),
    )
    return ImageTower(_filled(network, state, path)).eval().requires_grad_(False)


def load_text_tower(source: str | Path, download: bool = False) -> TextTower:
    """A text tower; as :func:`load_image_tower`."""
    from open_clip.transformer import TextTransformer

    if (named := _by_name(source, TEXT, download)) is not None:
        return TextTower(named).eval().requires_grad_(False)
    path = Path(source)
    header = read_header(path, TEXT)
    state = _unified(path, header, "text")
    vocabulary, width = state["token_embedding.weight"].shape
    state.setdefault("text_projection", torch.eye(width))
    network = TextTransformer(
        context_length=len(state["positional_embedding"]),
        vocab_size=vocabulary,
        output_dim=state["text_projection"].shape[1],
        mlp_ratio=_ratio(state, width),
        **_common(state, width, "text"),
    )
    return TextTower(_filled(network, state, path)).eval().requires_grad_(False)


def _by_name(source: str | Path, expected: str, download: bool) -> nn.Module | None:
    """open_clip's model of a name; None where the source is a file."""
    if Path(source).exists() or ":" not in str(source):
        return None
    if not download:
        raise ModelError(f"{source} would be downloaded, which is off; give {expected}, or allow the download")
    import open_clip

    name, _, tag = str(source).partition(":")
    try:
        return open_clip.create_model(name, pretrained=tag)
    except (RuntimeError, OSError, ValueError) as e:
        raise ModelError(f"{source} could not be downloaded ({str(e).splitlines()[0]})") from e


def _common(state: dict[str, Tensor], width: int, tower: str) -> dict[str, object]:
    from open_clip.transformer import QuickGELU

    heads = _HEADS.get(width, max(1, width // 64)) if tower == "image" else max(1, width // 64)
    layers = len({k.split(".")[2] for k in state if k.startswith("transformer.resblocks.")})
    act: Callable = QuickGELU if width in _QUICK[tower] else nn.GELU
    return {"width": width, "layers": layers, "heads": heads, "act_layer": act}


def _ratio(state: dict[str, Tensor], width: int) -> float:
    return state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0] / width


def _filled(network: nn.Module, state: dict[str, Tensor], path: Path) -> nn.Module:
    try:
        missing, _ = network.load_state_dict(state, strict=False)
    except RuntimeError as e:
        raise ModelError(f"{path} does not fit together ({str(e).splitlines()[1].strip()}); download it again") from e
    if missing := [m for m in missing if "attn_mask" not in m]:
        raise ModelError(f"{path} lacks {missing[0]}; download it again")
    return network


_OUTER = {
    "image": {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layrnorm.": "ln_pre.",
        "post_layernorm.": "ln_post.",
    },
    "text": {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm.": "ln_final.",
    },
}
_INNER = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}


def _unified(path: Path, header: Header, tower: str) -> dict[str, Tensor]:
    """A tower's weights under open_clip's names, float32."""
    own = {"image": "visual.", "text": ""}[tower]
    theirs = {"image": "vision_model.", "text": "text_model."}[tower]
    marks = (f"{own}transformer.resblocks.0.mlp.c_fc.weight", f"{theirs}encoder.layers.0.mlp.fc1.weight")
    if not any(mark in header for mark in marks):
        raise ModelError(
            f"{path} is no {tower} encoder: {describe(header)}. Give {IMAGE if tower == 'image' else TEXT}"
        )
    state = read_tensors(path, dtype=torch.float32)
    if marks[0] in header:
        return {k.removeprefix(own): v for k, v in state.items() if k.startswith(own)}
    out: dict[str, Tensor] = {}
    projection = state.get("visual_projection.weight" if tower == "image" else "text_projection.weight")
    if projection is not None:
        out["proj" if tower == "image" else "text_projection"] = projection.T
    elif tower == "image":
        raise ModelError(f"{path} has no visual_projection; give the encoder with its projection")
    for name, tensor in state.items():
        name = name.removeprefix(theirs)
        for begin, renamed in _OUTER[tower].items():
            if name.startswith(begin):
                out[name.replace(begin, renamed)] = tensor
    layers = len({k.split(".")[3] for k in state if k.startswith(f"{theirs}encoder.layers.")})
    for i in range(layers):
        old, new = f"{theirs}encoder.layers.{i}.", f"transformer.resblocks.{i}."
        for kind in ("weight", "bias"):
            out[f"{new}attn.in_proj_{kind}"] = torch.cat([state[f"{old}self_attn.{x}_proj.{kind}"] for x in "qkv"])
            out[f"{new}attn.out_proj.{kind}"] = state[f"{old}self_attn.out_proj.{kind}"]
            out |= {f"{new}{b}.{kind}": state[f"{old}{a}.{kind}"] for a, b in _INNER.items()}
    return out
