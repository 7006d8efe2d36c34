"""Adapters beside a model's layers while a block runs: never merged, gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from ...kernels.lora_slots import lora_slots
from ..errors import InputError, ModelError
from ..layers.fp8 import compute_dtype
from ..video.scenes import of_scene
from .adapter import Adapter
from .formats import AdapterFile, read_adapters
from .names import ldm_unet_name


@dataclass(frozen=True)
class LoRA:
    """An adapter file as used in a run.

    Attributes:
        file: its contents. layers: adapters by the model's part (``unet``, ``text 1``, ``text 2``) and layer.
        strength: 0 is off, 1 as trained; may be negative.
        steps: ``(place, factor)`` points over the steps from 0 to 1, linear between them; empty is 1 throughout.
        scenes: a factor for each scene in order; scenes beyond them take the last; empty is 1 throughout.
        unmatched: layers in the file that the model lacks.
    """

    file: AdapterFile
    layers: dict[str, dict[str, Adapter]]
    strength: float = 1.0
    steps: tuple[tuple[float, float], ...] = ()
    scenes: tuple[float, ...] = ()
    unmatched: tuple[str, ...] = ()

    def at(self, progress: float, scene: int) -> float:
        """The strength at a place along the steps in 0..1, in a scene counted from 0."""
        return self.in_scene(scene) * _interpolated(self.steps, progress)

    def in_scene(self, scene: int) -> float:
        """The strength in a scene, steps apart."""
        return self.strength * (of_scene(self.scenes, scene) if self.scenes else 1.0)

    @property
    def digest(self) -> str:
        """What tells its effect from another's."""
        return f"{self.file.digest}:{self.strength}:{self.steps}:{self.scenes}"

    @property
    def report(self) -> str:
        """Matched and unmatched layers in a line."""
        matched = ", ".join(f"{len(v)} in {part}" for part, v in self.layers.items() if v)
        rest = [*self.unmatched, *self.file.unread]
        tail = f"; {len(rest)} unmatched ({', '.join(rest[:3])}{', ...' if len(rest) > 3 else ''})" if rest else ""
        return f"{self.file.path.name}: {matched}{tail}"


def _interpolated(points: tuple[tuple[float, float], ...], place: float) -> float:
    if not points:
        return 1.0
    for (a, x), (b, y) in pairwise(points):
        if a <= place <= b and b > a:
            return x + (y - x) * (place - a) / (b - a)
    return points[0][1] if place <= points[0][0] else points[-1][1]


def load_lora(
    path: Path,
    parts: dict[str, nn.Module],
    base: str,
    strength: float = 1.0,
    steps: str = "",
    scenes: str = "",
) -> LoRA:
    """Reads an adapter file and finds the layers that it is for.

    Args:
        parts: the model's networks under ``unet``, ``text 1`` and ``text 2``. base: its name, for messages.
        steps: strength over the steps as ``0:1, 0.5:0.2``. scenes: a factor for each scene as ``1, 0.5``.

    Raises:
        ModelError: no layer of the file is one of the model's, or their sizes differ; names the likely base.
        InputError: a schedule that cannot be read.
    """
    if not -10 <= strength <= 10:
        raise InputError(f"LoRA strength = {strength} is out of range; give -10 to 10")
    file = read_adapters(path)
    names = layer_names(parts)
    layers: dict[str, dict[str, Adapter]] = {part: {} for part in parts}
    unmatched = []
    for name, adapter in file.adapters.items():
        if name.replace(".", "_") not in names:
            unmatched.append(name)
            continue
        part, layer = names[name.replace(".", "_")]
        if not adapter.fits:
            sizes = ", ".join(f"{factor} {tuple(v.shape)}" for factor, v in adapter.factors.items())
            raise ModelError(f"{path}: the factors of {name} do not fit together ({sizes}); export the LoRA again")
        weight = parts[part].get_submodule(layer).weight
        expected = (weight.shape[0], weight[0].numel())
        if adapter.shape != expected:
            raise ModelError(
                f"{path} is a LoRA for {likely_base(file)}, and the model is {base}: "
                f"{name} is {adapter.shape[0]}x{adapter.shape[1]}, the model's layer {expected[0]}x{expected[1]}"
            )
        layers[part][layer] = adapter
    if foreign := _foreign(layers, unmatched):
        raise ModelError(
            f"{path} is a LoRA for {likely_base(file)}, and the model is {base}: of its {foreign} "
            f"(first unmatched: {unmatched[0]}). Give one for {base}"
        )
    if not any(layers.values()):
        raise ModelError(
            f"{path}: none of its {len(file.adapters)} layers is one of {base}'s "
            f"(first: {next(iter(file.adapters))}). It looks like a LoRA for {likely_base(file)}; give one for {base}"
        )
    return LoRA(file, layers, strength, parse_steps(steps), parse_scenes(scenes), tuple(unmatched))


# How the names of text encoders' layers begin, dots as underscores.
_TEXT = (
    "lora_te",
    "lycoris_te",
    "text_encoder",
    "text_model",
    "te_",
    "te1_",
    "te2_",
    "clip_",
    "conditioner_",
    "cond_stage_",
)


def _foreign(layers: dict[str, dict[str, Adapter]], unmatched: list[str]) -> str | None:
    """What of a file says that it is for another model, though some layers match; None where nothing does.

    Several models share a text encoder: a file for another one matches there, and nowhere else.
    """
    if not any(layers.values()):
        return None
    matched = sum(len(found) for part, found in layers.items() if part == "unet")
    missed = sum(not name.replace(".", "_").startswith(_TEXT) for name in unmatched)
    if missed > matched:
        return f"{matched + missed} layers beside text encoders, {missed} are none of the model's"
    second = [name for name in unmatched if name.replace(".", "_").startswith(("lora_te2", "text_encoder_2", "te2_"))]
    if second and "text 2" not in layers:
        return f"{len(second)} layers of a second text encoder, none is the model's"
    return None


def layer_names(parts: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """Every name that a format gives to a layer, dots as underscores, and the part and layer of the model that it is."""
    out: dict[str, tuple[str, str]] = {}
    for part, model in parts.items():
        for layer, module in model.named_modules():
            if not isinstance(module, (nn.Linear, nn.Conv2d)):
                continue
            for name in _names(part, layer, model):
                out.setdefault(name.replace(".", "_"), (part, layer))
    return out


def _names(part: str, layer: str, model: nn.Module) -> Iterator[str]:
    if part == "unet":
        yield from (f"unet.{layer}", layer)
        for dotted in (layer, ldm_unet_name(layer, model)):
            yield from (f"{prefix}{dotted.replace('.', '_')}" for prefix in ("lora_unet_", "lycoris_", "lycoris_unet_"))
        yield f"diffusion_model.{ldm_unet_name(layer, model)}"
        return
    number = part.split()[-1]
    layer = "text_model." + layer.removeprefix("text_model.")
    kohya = ("lora_te_", "lora_te1_", "lycoris_te_") if number == "1" else ("lora_te2_",)
    yield f"text_encoder{'' if number == '1' else '_2'}.{layer}"
    yield f"text_encoders.{'clip_l' if number == '1' else 'clip_g'}.transformer.{layer}"
    yield from (prefix + layer.replace(".", "_") for prefix in kohya)


def likely_base(file: AdapterFile) -> str:
    """The model that a file's names and sizes suggest, in words."""
    cross = {
        a.factors["down"][0].numel()
        for name, a in file.adapters.items()
        if a.kind == "lora" and name.replace(".", "_").endswith("attn2_to_k")
    }
    for width, base in ((2048, "SDXL"), (1024, "SD 2"), (768, "SD 1.5")):
        if width in cross:
            return base
    names = " ".join(file.adapters).replace("_", ".")
    for mark, base in (
        ("single.transformer.blocks", "FLUX"),
        ("single.blocks", "FLUX or HunyuanVideo"),
        ("joint.blocks", "SD 3"),
        ("lora.te2", "SDXL"),
        ("text.encoder.2", "SDXL"),
        ("double.blocks", "FLUX or HunyuanVideo"),
        ("joint.transformer.blocks", "SD 3"),
        ("attn.add.k.proj", "SD 3 or FLUX"),
        ("self.attn", "Wan, or a text encoder"),
        ("down.blocks", "a Stable Diffusion of another size"),
        ("input.blocks", "a Stable Diffusion of another size"),
        ("transformer.blocks", "LTXV or another transformer"),
    ):
        if mark in names:
            return base
    return "another model"


def parse_steps(text: str) -> tuple[tuple[float, float], ...]:
    """Factors over the steps, ``0:1, 0.5:0.2``, by place in 0..1. Raises InputError for anything else."""
    try:
        points = tuple(sorted(tuple(map(float, p.split(":"))) for p in text.split(",") if p.strip()))
        if any(len(p) != 2 or not 0 <= p[0] <= 1 or not isfinite(p[1]) for p in points):
            raise ValueError
    except ValueError as e:
        raise InputError(f"LoRA steps = {text!r}: give points from 0 to 1 with factors, such as 0:1, 0.5:0.2") from e
    return points


def parse_scenes(text: str) -> tuple[float, ...]:
    """A factor for each scene, ``1, 0.5``. Raises InputError for what is no finite number."""
    try:
        factors = tuple(float(v) for v in text.split(",") if v.strip())
        if not all(map(isfinite, factors)):
            raise ValueError
    except ValueError as e:
        raise InputError(f"LoRA scenes = {text!r}: give a factor for each scene, such as 1, 0.5") from e
    return factors


class Strengths:
    """Strengths of the adapters that are in place; 0 takes one out of the computation.

    Attributes:
        on_device: the same numbers ``[adapters]`` in float32.
        read_as_numbers: adapters that a layer reads out of ``values``.
    """

    def __init__(self, values: list[float], device: torch.device):
        self.on_device = torch.zeros(len(values), device=device)
        self.read_as_numbers: set[int] = set()
        self._by_rank: list[tuple[Tensor, Tensor, Tensor]] = []
        self._values: list[float] = []
        self.values = values

    @property
    def values(self) -> list[float]:
        return self._values

    @values.setter
    def values(self, values: list[float]) -> None:
        if values == self._values:
            return
        self._values = values
        self.on_device.copy_(torch.tensor(values))
        for index, scales, ranked in self._by_rank:
            torch.mul(self.on_device[index], scales, out=ranked)

    def by_rank(self, index: Tensor, scales: Tensor) -> Tensor:
        """Strengths of a layer's ranks ``[ranks]``, which follow ``values`` in place.

        Args:
            index: which adapter each rank is of. scales: of the adapters, by rank.
        """
        ranked = self.on_device[index] * scales
        self._by_rank.append((index, scales, ranked))
        return ranked

    @property
    def captured(self) -> tuple[float, ...]:
        """What a CUDA graph of the model keeps of them: which are at work, and numbers where layers read numbers."""
        return tuple(v if i in self.read_as_numbers else float(v != 0) for i, v in enumerate(self.values))


@contextmanager
def injected(model: nn.Module, part: str, loras: tuple[LoRA, ...]) -> Iterator[Strengths]:
    """In this block the adapters act beside the model's layers; change ``values`` of what is given at any time."""
    device = next(model.parameters()).device
    strengths = Strengths([lora.strength for lora in loras], device)
    by_layer: dict[str, list[tuple[int, Adapter]]] = {}
    for number, lora in enumerate(loras):
        for layer, adapter in lora.layers.get(part, {}).items():
            by_layer.setdefault(layer, []).append((number, adapter))
    with ExitStack() as stack:
        for layer, adapters in by_layer.items():
            module = model.get_submodule(layer)
            dtype = compute_dtype(module)
            moved = [(n, a.with_factors(lambda v, d=dtype: v.to(device, d))) for n, a in adapters]
            linear = isinstance(module, nn.Linear)
            in_slots = [(n, a) for n, a in moved if linear and a.is_plain]
            others = [(n, a) for n, a in moved if not (linear and a.is_plain)]
            strengths.read_as_numbers |= {n for n, _ in others}
            hooks = [_slots(in_slots, strengths)] if in_slots else []
            hooks += [_bypass(others, strengths)] if others else []
            for hook in hooks:
                stack.callback(module.register_forward_hook(hook).remove)
        yield strengths


def _slots(adapters: list[tuple[int, Adapter]], strengths: Strengths) -> Callable[..., Tensor]:
    """All plain adapters of a linear layer as one narrow product beside it."""
    numbers = [n for n, _ in adapters]
    down = torch.cat([a.factors["down"].flatten(1) for _, a in adapters])
    up = torch.cat([a.factors["up"].flatten(1) for _, a in adapters], dim=1)
    ranks = torch.tensor([len(a.factors["down"]) for _, a in adapters])
    index = torch.tensor(numbers).repeat_interleave(ranks).to(down.device)
    scales = torch.tensor([a.scale for _, a in adapters]).repeat_interleave(ranks).to(down.device)
    ranked = strengths.by_rank(index, scales)

    def hook(module, inputs, output):
        if not any(strengths.values[n] for n in numbers):
            return output
        return lora_slots(output, inputs[0], down, up, ranked)

    return hook


def _bypass(adapters: list[tuple[int, Adapter]], strengths: Strengths) -> Callable[..., Tensor]:
    def hook(module, inputs, output):
        added = output
        for number, adapter in adapters:
            strength = strengths.values[number]
            if strength:
                added = added + strength * adapter.added(module, inputs[0])
        return added

    return hook
