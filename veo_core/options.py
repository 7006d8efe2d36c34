"""Options of a run, checked once, where they come in."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import InputError
from .style.injection import PRESETS, StyleInjection
from .video.scenes import Detector


@dataclass(frozen=True)
class Defaults:
    """Settings that suit a model: denoising steps, guidance scale, frames in a window and shared by two windows."""

    steps: int
    guidance: float
    window: int
    overlap: int


class StylizeOptions(BaseModel):
    """What decides the result, beside the clip, the style and the model. None leaves a choice to the model.

    Attributes:
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 is off, more exaggerates the style.
        strength: how far to go from the plain model (0) to the style (1). Plain veo-mini gives the source back, a plain
            diffusion model the source redrawn after the prompt alone.
        seed: of the noise; the noise of a frame depends on this and the frame's index alone.
        window: frames denoised together. overlap: frames that two windows share.
        min_scene: shortest scene in frames.
        detector: of cuts.
        injection: how style enters a model that was not trained for it. denoise: in place of the injection's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(None, ge=1, le=1000)
    guidance: float | None = Field(None, ge=0, le=50, allow_inf_nan=False)
    strength: float = Field(1.0, ge=0, le=1)
    seed: int = Field(0, ge=0, lt=1 << 64)
    window: int | None = Field(None, ge=2, le=256)
    overlap: int | None = Field(None, ge=0, le=128)
    min_scene: int = Field(1, ge=1)
    detector: Detector = "builtin"
    injection: StyleInjection = PRESETS["balanced"]
    denoise: float | None = Field(None, gt=0, le=1)

    def for_backbone(self, own: Defaults, reads: Set[str]) -> StylizeOptions:
        """The same options with every choice made, and what the model does not read as if it had not been given.

        Args:
            own, reads: a backbone's ``defaults`` and ``reads``.

        Raises InputError when overlap is over half of window.
        """
        chosen = {
            "steps": own.steps,
            "guidance": own.guidance,
            "window": own.window,
            "overlap": min(own.overlap, (self.window or own.window) // 2),
            "denoise": self.injection.denoise,
        }
        unread = {n: f.default for n, f in StylizeOptions.model_fields.items() if n not in reads}
        filled = self.model_copy(update={k: v for k, v in chosen.items() if getattr(self, k) is None} | unread)
        if filled.overlap > filled.window // 2:
            raise InputError(f"overlap = {filled.overlap} is over half of window = {filled.window}; make it smaller")
        return filled


def parse_fusion(value: str | float | None) -> float | None:
    """How much decoded frames are fused along the motion: 0 (``off``) to 1; None (``auto``) leaves it to the run.

    Raises InputError for anything else.
    """
    named = {"auto": None, "off": 0.0, None: None}
    if value in named:
        return named[value]
    try:
        amount = float(value)
        if not 0 <= amount <= 1:
            raise ValueError
    except ValueError as e:
        raise InputError(f"fusion = {value!r}: give auto, off, or a number from 0 to 1") from e
    return amount


def parse_options(
    preset: str = "balanced", inversion: bool = False, knobs: str = "", **values: object
) -> StylizeOptions:
    """Options from loose values. Raises InputError that names the option, its value and what it may be.

    Args:
        preset: a name in PRESETS for how style enters a model that was not trained for it.
        inversion: whether it starts from DDIM inversion.
        knobs: of that preset to set otherwise, ``query=0.6, adain=key_value, sources=self+anchor``.
    """
    if preset not in PRESETS:
        raise InputError(f"preset = {preset!r} is unknown; give {', '.join(PRESETS)}")
    values.setdefault("injection", PRESETS[preset].model_dump() | {"inversion": inversion} | _parse_knobs(knobs))
    try:
        return StylizeOptions(**values)
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, p['loc']))} = {p['input']!r}: {p['msg'].lower()}" for p in e.errors()]
        raise InputError("; ".join(problems)) from e


def _parse_knobs(text: str) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in StyleInjection.model_fields:
            known = ", ".join(StyleInjection.model_fields)
            raise InputError(f"knob {part!r} is unknown; write name=value with a name of {known}")
        chosen[name] = value.split("+") if "+" in value or name in ("sources", "layers", "steps", "blend") else value
    return chosen
