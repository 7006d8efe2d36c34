"""Noise schedules, from diffusers."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class FlowSchedule:
    """Euler steps along a straight path from sigma 1 to 0, by diffusers' FlowMatchEulerDiscreteScheduler.

    A model that predicts the clean end x0 has the velocity ``(x - x0) / sigma`` (Lipman et al. 2023).

    Args:
        steps: number of predictions, at least 1.
    """

    def __init__(self, steps: int):
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))

    @property
    def sigmas(self) -> list[float]:
        """Sigma before each step, descending from 1."""
        return self.scheduler.sigmas[:-1].tolist()

    def step(self, index: int, x: Tensor, clean: Tensor) -> Tensor:
        """From ``x`` at step ``index`` towards the predicted ``clean`` latents; steps come in order."""
        sigma = self.scheduler.sigmas[index].to(x)
        return self.scheduler.step((x - clean) / sigma, self.scheduler.timesteps[index], x, return_dict=False)[0]
