"""Models, one implementation each; ``load_backbone`` finds the one that a file belongs to."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import ModelError
from ..weights_file import describe, read_header
from .base import Backbone

__all__ = ["Backbone", "load_backbone"]

EXPECTED = "veo-mini.safetensors, an SD 1.5 or SDXL checkpoint (safetensors), or a diffusers folder of one"


def load_backbone(
    path: Path | None, device: torch.device, dtype: torch.dtype | None = None, **settings: object
) -> Backbone:
    """Loads a model by what its file holds; None is the bundled veo-mini.

    Args:
        dtype: computed in; None is fp16 on a GPU and float32 on the CPU.
        settings: sampler, scheduler, motion modules and weight_dtype, for Stable Diffusion.

    Raises:
        ModelError: the file is missing, damaged or of a kind that is not known here.
    """
    from .mini import backbone as mini

    settings = {k: v for k, v in settings.items() if v is not None}
    path = path or mini.BUNDLED
    if not path.is_dir() and mini.detect(header := read_header(path, EXPECTED)):
        if settings:
            raise ModelError(
                f"{next(iter(settings))} is for Stable Diffusion, and {path.name} is veo-mini; leave it out"
            )
        return mini.load(path, device, dtype)
    from .stable_diffusion import backbone as stable_diffusion
    from .stable_diffusion import files

    known = files.detect_folder(path) if path.is_dir() else files.detect(header)
    if known is None:
        held = "it is no diffusers folder of these (model_index.json)" if path.is_dir() else describe(header)
        raise ModelError(f"{path} cannot be used as the model: {held}. Give {EXPECTED}")
    return stable_diffusion.load(path, device, dtype=dtype, **settings)
