"""Models, one implementation each; ``load_backbone`` finds the one that a file belongs to."""

from __future__ import annotations

from pathlib import Path

import torch

from .base import Backbone
from .mini import backbone as mini

__all__ = ["Backbone", "load_backbone"]


def load_backbone(path: Path | None, device: torch.device) -> Backbone:
    """Loads a model by what its file holds; None is the bundled veo-mini.

    Raises ModelError when the file is missing, damaged or of a kind that is not known here.
    """
    return mini.load(path or mini.BUNDLED, device)
