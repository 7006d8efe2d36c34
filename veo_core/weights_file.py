"""What a weights file holds, told from its header alone; pickles are never opened."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError

Header = dict[str, tuple[int, ...]]


def read_header(path: Path, expected: str) -> Header:
    """Names and shapes of a safetensors file's tensors.

    Args:
        expected: what should have been given, for the message.

    Raises:
        ModelError: the file is missing, a pickle or another format, or cut short.
    """
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give {expected}")
    try:
        with safe_open(path, "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{path} {_not_safetensors(path, e)}. Give {expected}, as safetensors") from e


def _not_safetensors(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        return "is empty (0 bytes)"
    if head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "is a pickle or zip archive (.ckpt, .pt, .bin), which can run code and is never loaded"
    if head[:4] == b"GGUF":
        return "is a GGUF file, which is not read"
    return f"is not a whole safetensors file ({error}); the download may have been cut short"


def read_tensors(path: Path, prefix: str = "", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors whose names begin with a prefix, on the CPU; the prefix stays. fp8 files come out in ``dtype``.

    Weights that lie beside a scale, as scaled fp8 files have them, are multiplied by it, and scales are left out.
    """
    with safe_open(path, "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
    scales = {k: v for k, v in found.items() if k.endswith(_SCALES)}
    for name, scale in scales.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if not name.endswith(_OF_INPUTS) and weight in found:
            scaled = found[weight].float() * scale.float().reshape(-1, *[1] * (found[weight].ndim - 1))
            found[weight] = scaled.to(dtype or torch.float32)
    kept = {k: v for k, v in found.items() if k not in scales}
    return {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in kept.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """A safetensors file's own texts."""
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


_OF_INPUTS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
_SCALES = (".scale_weight", ".weight_scale", *_OF_INPUTS)


_WHOLE, _PIECE, _EVERY = 64 << 20, 1 << 20, 64 << 20


@cache
def _hash(path: Path, modified: int, size: int) -> str:
    hashed = hashlib.sha256(str(size).encode())
    step = _PIECE if size <= _WHOLE else _EVERY
    with path.open("rb") as file:
        for place in (*range(0, size, step), max(0, size - _PIECE)):
            file.seek(place)
            hashed.update(file.read(_PIECE))
    return hashed.hexdigest()


def digest(path: Path) -> str:
    """What tells a weights file, or a folder of them, from others: a SHA-256, remembered while they do not change.

    Of files above 64 MiB, one MiB in 64 is read: checkpoints of many gigabytes should not take minutes to tell apart.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    hashes = [_hash(f, f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_state(path: Path) -> str:
    """Changes when a file, or any file in a folder, is written again; empty where nothing is there."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return repr([(str(f), s.st_size, s.st_mtime_ns) for f in files if f.is_file() for s in [f.stat()]])


# What adds to a model in ways that are not read, by parts of its tensors' names.
_ADAPTERS = {
    "a full difference of weights (diff), which is not low-rank": (".diff", ".diff_b"),
    "an OFT adapter (orthogonal fine-tuning)": (".oft_blocks", ".oft_diag", ".oft_R", ".boft_R"),
    "a GLoRA adapter": (".a1.weight", ".b1.weight"),
    "an IA3 adapter": (".ia3_l", ".on_input"),
    "a set of norms beside a LoRA": (".w_norm",),
}


def describe(header: Header) -> str:
    """What kind of weights these names belong to, in words for a message."""
    names = list(header)

    def some(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    def begins(*parts: str) -> bool:
        return any(name.startswith(parts) for name in names)

    cross = next((s[-1] for n, s in header.items() if n.endswith("attn2.to_k.weight")), None)
    base = {768: "SD 1.5", 1024: "SD 2", 2048: "SDXL", 1280: "the SDXL refiner"}.get(cross, "another model")
    if not names:
        return "it holds no tensors"
    for kind, parts in _ADAPTERS.items():
        if any(f"{part}." in f"{name}." for name in names for part in parts):
            return f"it is {kind}"
    if some("lora_", ".lora", "hada_w", "lokr_w", "dora_scale"):
        return "it is a LoRA"
    if begins("ip_adapter.", "image_proj."):
        return "it is an IP-Adapter"
    if begins("control_model.", "controlnet_", "input_hint_block."):
        return "it is a ControlNet"
    if some("motion_modules"):
        return "it is an AnimateDiff motion module"
    if begins("unet.motion."):
        return "it is veo-mini"
    if begins("model.diffusion_model.input_blocks."):
        return f"it is a checkpoint of {base}"
    if begins("model.diffusion_model."):
        return "it is a checkpoint of another architecture"
    if begins("down_blocks.", "input_blocks."):
        return f"it is the UNet alone, of {base}"
    if begins("model_ema."):
        return "it holds averaged weights alone (EMA), without those to run"
    if begins("diffusion_model."):
        return f"it is the UNet under ComfyUI's own names, of {base}"
    if begins("encoder.", "decoder.", "first_stage_model.") and some("decoder.conv_in", "decoder.conv1"):
        return "it is a VAE alone"
    if begins("vision_model.", "visual."):
        return "it is a CLIP image encoder"
    if begins("text_model.", "transformer.resblocks."):
        return "it is a text encoder alone"
    return f"its tensors are of an unknown kind ({', '.join(names[:3])}, ...)"
