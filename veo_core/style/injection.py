"""Knobs of training-free style: what is done inside a model that was never trained for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    from .encoder import Style

Preset = Literal["faithful", "balanced", "strong"]
Source = Literal["self", "previous", "anchor", "next", "warped"]


RAMP = 0.1
_SHARES = ("attention", "norm", "latent_norm", "start_adain")


def trapezoid(place: float, span: tuple[float, float]) -> float:
    """1 inside a span of 0..1, falling to 0 within a tenth outside it; sharp at 0 and at 1."""
    begin, end = span
    return max(0.0, min(1.0, 1 + (place - begin) / RAMP, 1 + (end - place) / RAMP))


class StyleInjection(BaseModel):
    """How a style picture enters an image model's self-attention and norms, and how frames are held together.

    Attributes:
        denoise: share of the noise schedule that frames go through. Low keeps every edge of the source, high repaints;
            near 1 only the source's largest shapes are left.
        attention: share of the style's attention output in each style layer. 0 leaves colours and strokes to the prompt.
        query: how much of each query is the source frame's own (gamma of StyleID, Chung et al. 2024, eq. 5). High keeps
            the drawing where it was, low lets the style move it. Above 0 each step also evaluates the source frames.
        temperature: factor on the style's attention logits (StyleID, eq. 6). Above 1 strokes get crisper, below 1 softer.
        adain: what takes the style's statistics: nothing (StyleID: keys and values are the style's); queries and keys
            (StyleAligned, Hertz et al. 2024, eq. 3: the frame's own tokens stay beside the style's); or keys and values
            (UniVST, Song et al. 2024: the frame's layout in the style's statistics).
        blend: with ``adain = "key_value"``, the frame's share in keys and values at the first and at the last step;
            layout is freer where it is low.
        layers: from where to where along the up path style pictures enter attention and norms, 0 the path's first, 1 its
            last. Early layers carry composition, late ones texture and colour.
        steps: from where to where along the steps style pictures enter attention, norms and latents. Ending early leaves
            details to the prompt.
        sources: frames whose tokens each frame reads in every self-attention. More of them flicker less, cost more, and
            smear faster motion; only "self" makes frames independent. "warped" beside them is of the frame before what
            the motion says each place was there, and the eight tokens around it: few, and none where it was hidden.
        norm: share of ST-Norm in the up path's group norms: frames take the style's contrast there, steadily.
        latent_norm: share of ST-Norm in the predicted clean latents: steadier colour and exposure.
        start_adain: share of the style's moments in the latents that denoising starts from: overall colour.
        inversion: start from DDIM inversion of the source (Song et al. 2021, eq. 14 backwards) in place of fresh noise.
            Closer to the source, at twice the time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    denoise: float = Field(0.55, gt=0, le=1)
    attention: float = Field(1.0, ge=0, le=1)
    query: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(1.5, gt=0, le=10)
    adain: Literal["none", "query_key", "key_value"] = "none"
    blend: tuple[float, float] = (0.1, 0.9)
    layers: tuple[float, float] = (0.4, 1.0)
    steps: tuple[float, float] = (0.0, 1.0)
    sources: tuple[Source, ...] = Field(("self", "previous", "anchor"), min_length=1)
    norm: float = Field(0.3, ge=0, le=1)
    latent_norm: float = Field(0.5, ge=0, le=1)
    start_adain: float = Field(0.8, ge=0, le=1)
    inversion: bool = False

    @field_validator("sources")
    @classmethod
    def _reads_a_frame(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        if set(sources) == {"warped"}:
            raise ValueError("a place that was hidden would read nothing; add self or another frame")
        return sources

    def for_style(self, style: Style, strength: float) -> StyleInjection:
        """The same with every share multiplied by the run's strength and the style's weight, up to 1 in all.

        At strength 0 nothing is left, sources among frames neither: the plain model. Without pictures what only they feed
        is off, and ST-Norm holds frames to the clip's own moments.
        """
        if strength == 0:
            return self.model_copy(update=dict.fromkeys(_SHARES, 0.0) | {"sources": ("self",)})
        amount = min(1.0, strength * style.weight) if style.pictures else strength
        scaled = {name: getattr(self, name) * amount for name in _SHARES}
        if not style.pictures:
            scaled |= {"attention": 0.0, "start_adain": 0.0}
        return self.model_copy(update=scaled)

    def gate(self, progress: float) -> float:
        """Share of the style that enters at a place along the steps, both in 0..1."""
        return trapezoid(progress, self.steps)

    @property
    def plain(self) -> bool:
        """Whether the model is left as it is."""
        return self.sources == ("self",) and not (self.attention or self.norm or self.latent_norm)


PRESETS: dict[str, StyleInjection] = {
    "faithful": StyleInjection(
        denoise=0.4, attention=0.8, query=0.75, norm=0.2, latent_norm=0.3, start_adain=0.5
    ),
    "balanced": StyleInjection(
        denoise=0.55, attention=1.0, query=0.5, norm=0.3, latent_norm=0.5, start_adain=0.8
    ),
    "strong": StyleInjection(
        denoise=0.7, attention=1.0, query=0.3, norm=0.5, latent_norm=0.7, start_adain=1.0
    ),
}  # fmt: skip
