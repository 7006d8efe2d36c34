"""Noise schedules, from diffusers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, ModelError

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


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


# Names as ComfyUI's samplers and schedulers have them.
SAMPLERS: dict[str, tuple[str, dict[str, object]]] = {
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "uni_pc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}
SPACINGS: dict[str, dict[str, object]] = {
    "karras": {"use_karras_sigmas": True},
    "normal": {},
    "exponential": {"use_exponential_sigmas": True},
    "sgm_uniform": {"timestep_spacing": "trailing"},
}


def steps_done(steps: int, denoise: float) -> int:
    """How many of a schedule's steps a share of it is, at least one: of 20 at 0.5 the last 10."""
    return min(max(1, int(steps * denoise)), steps)


class DiffusionSchedule:
    """Steps of a noise-predicting or velocity-predicting model, by diffusers' schedulers.

    ``model_input`` is variance preserving, ``x_t = a x_0 + s e`` with ``a^2 + s^2 = 1``, whatever the scheduler keeps.

    Args:
        config: the model's noise schedule, as diffusers keeps it in scheduler_config.json.
        sampler: a name in SAMPLERS. spacing: a name in SPACINGS.
        steps: of the whole schedule.
        denoise: share of it that is done, from its end: of 20 steps at 0.5 the last 10.
        device: of the latents.
        generators: one a frame, for samplers that add noise.

    Raises:
        InputError: an unknown name, or a spacing that the sampler cannot do.
    """

    def __init__(
        self,
        config: dict[str, object],
        sampler: str,
        spacing: str,
        steps: int,
        denoise: float,
        device: torch.device,
        generators: list[torch.Generator] | None = None,
    ):
        self.scheduler = make_scheduler(config, sampler, spacing)
        self._generators = {} if generators is None else {"generator": generators}
        if "generator" not in inspect.signature(self.scheduler.step).parameters:
            self._generators = {}
        if steps > MAX_STEPS:
            raise InputError(f"steps = {steps} is too many for {sampler}; give at most {MAX_STEPS}")
        try:
            self.scheduler.set_timesteps(steps, device=device)
        except ValueError as e:
            raise InputError(f"steps = {steps} does not go with {sampler} ({e}); give fewer") from e
        self._begin = (steps - steps_done(steps, denoise)) * self.scheduler.order
        self.scheduler.set_begin_index(self._begin) if hasattr(self.scheduler, "set_begin_index") else None
        self.timesteps = self.scheduler.timesteps[self._begin :]

    def __len__(self) -> int:
        return len(self.timesteps)

    def level(self, index: int) -> tuple[float, float]:
        """``(a, s)`` of the latents before a step."""
        if hasattr(self.scheduler, "sigmas"):
            sigma = float(self.scheduler.sigmas[self._begin + index])
            a = (1 + sigma**2) ** -0.5
            return a, sigma * a
        a = float(self.scheduler.alphas_cumprod[int(self.timesteps[index])]) ** 0.5
        return a, (1 - a**2) ** 0.5

    def start(self, content: Tensor, noise: Tensor) -> Tensor:
        """Content with the noise of the first step."""
        return self.scheduler.add_noise(content, noise, self.timesteps[:1].expand(len(content)))

    def from_variance_preserving(self, x: Tensor) -> Tensor:
        """Latents ``a x_0 + s e`` at the first step's level in the form that the scheduler keeps."""
        return x / self.level(0)[0] if self._keeps_exploding() else x

    def _keeps_exploding(self) -> bool:
        return type(self.scheduler).__name__.startswith(("Euler", "Heun"))

    def model_input(self, index: int, x: Tensor) -> Tensor:
        """What the model is given for the latents before a step."""
        return self.scheduler.scale_model_input(x, self.timesteps[index])

    def clean(self, index: int, model_input: Tensor, output: Tensor) -> Tensor:
        """The clean latents that a model's output stands for (Salimans and Ho 2022, appendix D)."""
        a, s = self.level(index)
        if self.scheduler.config.prediction_type == "v_prediction":
            return a * model_input - s * output
        return (model_input - s * output) / a

    def output(self, index: int, model_input: Tensor, clean: Tensor) -> Tensor:
        """The model's output that stands for clean latents; the inverse of :meth:`clean`."""
        a, s = self.level(index)
        if self.scheduler.config.prediction_type == "v_prediction":
            return (a * model_input - clean) / s
        return (model_input - a * clean) / s

    def step(self, index: int, x: Tensor, output: Tensor) -> Tensor:
        """The latents after a step; steps come in order."""
        return self.scheduler.step(output, self.timesteps[index], x, return_dict=False, **self._generators)[0]


PREDICTIONS = ("epsilon", "v_prediction")
# What a checkpoint says of its noise; how steps are spaced and solved is the sampler's and the user's.
_OF_THE_MODEL = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "rescale_betas_zero_snr", "set_alpha_to_one", "steps_offset", "timestep_spacing", "clip_sample",
)  # fmt: skip
MAX_STEPS = 500


def default_spacing(config: dict[str, object], sampler: str) -> str:
    """The spacing that suits a sampler and a checkpoint."""
    if config.get("rescale_betas_zero_snr"):
        return "sgm_uniform"
    return "karras" if sampler in ("dpmpp_2m", "dpmpp_2m_sde", "euler", "heun", "uni_pc") else "normal"


def make_scheduler(config: dict[str, object], sampler: str, spacing: str) -> SchedulerMixin:
    """diffusers' scheduler of these names.

    Raises:
        InputError: an unknown name, or what does not go together.
        ModelError: a checkpoint's noise schedule that cannot be used.
    """
    import diffusers

    for what, name, known in (("sampler", sampler, SAMPLERS), ("scheduler", spacing, SPACINGS)):
        if name not in known:
            raise InputError(f"{what} = {name!r} is unknown; give {', '.join(known)}")
    if (predicted := config.get("prediction_type", "epsilon")) not in PREDICTIONS:
        raise ModelError(f"the checkpoint predicts {predicted!r}, which is not known; {' and '.join(PREDICTIONS)} are")
    name, settings = SAMPLERS[sampler]
    kind = getattr(diffusers, name)
    settings = settings | SPACINGS[spacing]
    taken = inspect.signature(kind.__init__).parameters
    if refused := [s for s in settings if s not in taken]:
        raise InputError(
            f"scheduler = {spacing!r} does not go with sampler = {sampler!r} ({refused[0]}); give 'normal'"
        )
    if config.get("rescale_betas_zero_snr"):
        if "rescale_betas_zero_snr" not in taken:
            raise InputError(f"sampler = {sampler!r} cannot do the checkpoint's zero-terminal-SNR noise; give 'euler'")
        if spacing in ("karras", "exponential"):
            raise InputError(
                f"scheduler = {spacing!r} puts nearly all steps at pure noise with the checkpoint's zero-terminal-SNR noise; "
                "give 'sgm_uniform' or 'normal'"
            )
    try:
        return kind.from_config({k: config[k] for k in _OF_THE_MODEL if k in taken and k in config} | settings)
    except (TypeError, ValueError, NotImplementedError) as e:
        raise ModelError(
            f"the checkpoint's noise schedule cannot be used ({e}); download its scheduler_config.json again"
        ) from e
