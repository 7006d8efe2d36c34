"""Adapter files as people have them: kohya, diffusers, PEFT, LyCORIS (LoHa, LoKr), to one form."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from torch import Tensor

from ..errors import ModelError
from ..weights_file import describe, digest, read_header, read_metadata, read_tensors
from .adapter import Adapter

EXPECTED = "a LoRA in kohya's, diffusers', PEFT's or LyCORIS' format (safetensors, or PEFT's folder)"

# Endings of tensor names, and the factor that each is.
_ENDINGS: list[tuple[str, str]] = [
    (r"\.lora_down\.weight", "down"),
    (r"\.lora_up\.weight", "up"),
    (r"\.lora_mid\.weight", "mid"),
    (r"[._]lora\.down\.weight", "down"),
    (r"[._]lora\.up\.weight", "up"),
    (r"[._]lora_linear_layer\.down\.weight", "down"),
    (r"[._]lora_linear_layer\.up\.weight", "up"),
    (r"\.lora_A(?:\.[^.]+)?\.weight", "down"),
    (r"\.lora_B(?:\.[^.]+)?\.weight", "up"),
    (r"\.lora_magnitude_vector(?:\.(?!weight)[^.]+)?(?:\.weight)?", "magnitude"),
    (r"\.dora_scale", "dora_scale"),
    (r"\.alpha", "alpha"),
    (r"\.(hada_(?:w[12]_[ab]|t[12]))(?:\.default)?", ""),
    (r"\.(lokr_(?:w[12](?:_[ab])?|t2))(?:\.default)?", ""),
]
_PATTERNS = [(re.compile(f"(.+?){ending}$"), factor) for ending, factor in _ENDINGS]


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file's contents.

    Attributes:
        path, digest: of the file.
        adapters: by the layer's name as the file has it, less what trainers wrap around it.
        unread: tensors of kinds that are not adapters of a layer.
    """

    path: Path
    digest: str
    adapters: dict[str, Adapter]
    unread: tuple[str, ...] = ()


@dataclass
class _Scaling:
    """How a file's metadata says the factors are scaled."""

    rank_stabilised: bool = False
    alpha: float | None = None
    rank: int | None = None
    patterns: dict[str, float] = field(default_factory=dict)

    def scale(self, layer: str, rank: int, alpha: Tensor | None) -> float:
        value = next((v for k, v in self.patterns.items() if layer.endswith(k)), self.alpha)
        value = float(alpha) if alpha is not None else value
        if value is None:
            return 1.0
        if not isfinite(value) or rank < 1:
            raise ModelError(f"{layer} has alpha {value} and rank {rank}; export the LoRA again")
        return value / (rank**0.5 if self.rank_stabilised else rank)


def read_adapters(path: Path) -> AdapterFile:
    """Reads an adapter file or a PEFT folder.

    Raises:
        ModelError: it is missing, a pickle, cut short, or holds no adapter; the message says what it is.
    """
    folder = path if path.is_dir() else None
    if folder is not None:
        path = folder / "adapter_model.safetensors"
    header = read_header(path, EXPECTED)
    grouped, unread = defaultdict(dict), []
    for name, tensor in read_tensors(path).items():
        layer, factor = _split(name)
        if factor is None:
            unread.append(name)
        else:
            grouped[layer][factor] = tensor
    scalings = _scalings(path, folder)
    adapters = {}
    for layer, tensors in grouped.items():
        scaling = scalings[next((p for p in reversed(_PARTS) if layer.startswith(f"{p}.")), "")]
        made = _adapter(layer, {k: v.float() for k, v in tensors.items()}, scaling)
        if made is None:
            unread += [f"{layer} ({', '.join(sorted(tensors))})"]
        else:
            adapters[layer] = made
    if not adapters:
        kind = describe(header)
        kind = "it is a LoRA, but of no layer are all parts there" if kind == "it is a LoRA" else kind
        raise ModelError(f"{path} cannot be used as a LoRA: {kind}. Give {EXPECTED}")
    for layer, adapter in adapters.items():
        if not all(v.isfinite().all() for v in adapter.factors.values()):
            raise ModelError(f"{path} holds values that are not finite ({layer}); download it again")
    return AdapterFile(folder or path, digest(path), adapters, tuple(unread))


def _split(name: str) -> tuple[str, str | None]:
    """A tensor's layer and factor; None where it is no factor."""
    for pattern, factor in _PATTERNS:
        if match := pattern.match(name):
            return _layer(match[1]), factor or match[2]
    return name, None


def _layer(name: str) -> str:
    """A layer's name without what PEFT and the older diffusers wrap around it."""
    name = name.removeprefix("base_model.model.")
    name = re.sub(r"\.processor\.(to_[qkv]|to_out)$", r".\1", name)
    return re.sub(r"\.to_out$", ".to_out.0", name)


def _adapter(layer: str, tensors: dict[str, Tensor], scaling: _Scaling) -> Adapter | None:
    magnitude, alpha = tensors.pop("magnitude", None), tensors.pop("alpha", None)
    if magnitude is not None:
        magnitude = magnitude.flatten()
    elif (scale := tensors.pop("dora_scale", None)) is not None:
        # LyCORIS: one an output as [out, 1], or one an input as [1, in].
        magnitude = scale.reshape(1, -1) if scale.shape[0] == 1 else scale.flatten()
    kind = next((kind for kind in ("hada", "lokr") if any(name.startswith(kind) for name in tensors)), "")
    factors = {name.removeprefix(f"{kind}_"): v for name, v in tensors.items()}
    names, pairs = set(factors), ({"w1_a", "w1_b"}, {"w2_a", "w2_b"})
    if not kind and {"down", "up"} <= names:
        return Adapter("lora", factors, scaling.scale(layer, factors["down"].shape[0], alpha), magnitude)
    if kind == "hada" and pairs[0] | pairs[1] <= names:
        return Adapter("loha", factors, scaling.scale(layer, factors["w1_b"].shape[0], alpha), magnitude)
    if kind == "lokr" and all(f"w{n}" in names or pair <= names for n, pair in zip("12", pairs, strict=True)):
        factored = factors.get("w1_b", factors.get("w2_b"))
        # Both factors whole: LyCORIS leaves alpha out of account, PEFT goes by its configuration.
        rank, alpha = (scaling.rank, None) if factored is None else (factored.shape[0], alpha)
        return Adapter("lokr", factors, scaling.scale(layer, rank, alpha) if rank else 1.0, magnitude)
    return None


_PARTS = ("unet", "text_encoder", "text_encoder_2")


def _scalings(path: Path, folder: Path | None) -> dict[str, _Scaling]:
    """By part: from PEFT's adapter_config.json, diffusers' metadata, or that of kohya's scripts with LyCORIS."""
    metadata = read_metadata(path)
    try:
        if folder is not None:
            config = json.loads((folder / "adapter_config.json").read_text())
        else:
            config = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        arguments = json.loads(metadata.get("ss_network_args", "{}"))
        stabilised = str(arguments.get("rs_lora", "")).lower() == "true"
        whole = {k: v for k, v in config.items() if "." not in k}
        out = {"": _part_scaling(whole, stabilised)}
        for part in _PARTS:
            own = {k.removeprefix(f"{part}."): v for k, v in config.items() if k.startswith(f"{part}.")}
            out[part] = _part_scaling(own or whole, stabilised)
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise ModelError(f"{folder or path}: its metadata cannot be read ({e}); export the LoRA again") from e
    return out


def _part_scaling(config: dict, stabilised: bool) -> _Scaling:
    alpha, rank = config.get("lora_alpha", config.get("alpha")), config.get("r")
    patterns = {k: float(v) for k, v in (config.get("alpha_pattern") or {}).items()}
    return _Scaling(
        bool(config.get("use_rslora")) or stabilised,
        None if alpha is None else float(alpha),
        None if rank is None else int(rank),
        patterns,
    )
