"""One window under a style that its model was not trained for, whichever library evaluates the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..layers.st_norm import TemporalContext, calibrate
from ..layers.style_session import StyleSession, pooled_moments
from ..sampling.noise import frame_noise
from ..sampling.sampler import WindowJob
from ..style.encoder import Style, cover
from .base import Backbone

Shown = Literal["style", "content"]


class StyledWindow:
    """Decides what enters a model, what the session is shown, and what becomes of a prediction; others evaluate.

    Args:
        backbone: whose autoencoder reads the pictures.

    Attributes:
        session: what a model's attentions and norms ask. injection: the knobs, as far as the style has use for them.
        plain: whether the model is to run as it is.
        pictures: latents of the style pictures ``[m, C, h, w]``, cut to the frames' shape; None without any or if plain.
    """

    def __init__(self, backbone: Backbone, style: Style, job: WindowJob):
        self.job = job
        self.injection = job.options.injection.for_style(style, job.options.strength)
        self.plain, self.session = self.injection.plain, StyleSession(self.injection)
        self._shares, self.pictures = list(style.weights), None
        if style.pictures and not self.plain:
            height, width = (side * backbone.factor for side in job.content.shape[-2:])
            covers = (cover(p, height, width).to(backbone.device) for p in style.pictures)
            self.pictures = torch.cat([backbone.encode(c) for c in covers])

    def start(self) -> Tensor:
        """The source's latents ``[t, C, h, w]`` with the pictures' AdaIN, before noise."""
        content, amount = self.job.content, self.injection.start_adain
        if self.pictures is None or not amount:
            return content
        moments = pooled_moments(self.pictures, self._shares)
        return calibrate(content, TemporalContext(1), "start", amount * self.injection.gate(0.0), moments)

    def record(self, evaluate: Callable[[Shown, Tensor, Tensor], object]) -> None:
        """Shows the session the pictures, and the source, where it wants them.

        Args:
            evaluate: runs the model on clean latents ``[n, C, h, w]`` brought to its present level by noise of that shape.
        """
        if self.pictures is None:
            return
        if self.session.wants_style:
            places = range(-len(self.pictures), 0)
            noise = frame_noise(self.job.options.seed, places, tuple(self.pictures.shape[1:])).to(self.pictures)
            with self.session.record_style(self._shares):
                evaluate("style", self.pictures, noise)
        if self.session.wants_content:
            with self.session.record_content():
                evaluate("content", self.job.content, self.job.noise())

    def fused(
        self, index: int, progress: float, clean: Tensor, known: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Clean latents predicted at an evaluation after ST-Norm and the cross-fade with the window before.

        Args:
            index: of the evaluation. progress: how far the steps are, 0..1.
            known: the pictures' latents as the model knows them, where they differ from the autoencoder's.
        """
        if self.injection.latent_norm and not self.plain:
            moments, amount = None, self.injection.latent_norm
            if self.pictures is not None:
                moments = pooled_moments(self.pictures if known is None else known(self.pictures), self._shares)
                amount *= self.injection.gate(progress)
            clean = calibrate(clean, self.job.temporal(index), "latent", amount, moments)
        return self.job.fuse(index, clean)
