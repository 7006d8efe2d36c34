"""Models, one implementation each; ``load_backbone`` finds the one that a file belongs to."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import ModelError
from .base import Backbone
from .mini import backbone as mini


def load_backbone(path: Path | None, device: torch.device) -> Backbone:
    """Loads a model by what its file holds; None is the bundled veo-mini.

    Raises ModelError when the file is missing, damaged or of a kind that is not known here.
    """
    if path is None:
        return mini.load(device=device)
    return mini.load(path, device)


__all__ = ["Backbone", "ModelError", "load_backbone"]
