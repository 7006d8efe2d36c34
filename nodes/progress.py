"""The engine's progress on the canvas: the node's bar, a preview as frames form, and interruption."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
from PIL import Image

PREVIEW_EVERY = 0.5
PREVIEW_SIDE = 512


class CanvasMonitor:
    """A monitor for the engine. Interrupting in ComfyUI raises here, before the next step or chunk."""

    def __init__(self, node_id: str | None = None):
        self._bars: dict[str, comfy.utils.ProgressBar] = {}
        self._shown = 0.0
        self._node_id = node_id

    def __call__(self, progress) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not progress.total:
            return
        if progress.stage not in self._bars:
            self._bars[progress.stage] = comfy.utils.ProgressBar(progress.total, node_id=self._node_id)
        self._bars[progress.stage].update_absolute(progress.done, progress.total, self._preview(progress))

    def _preview(self, progress):
        now = time.monotonic()
        if progress.preview is None or now - self._shown < PREVIEW_EVERY:
            return None
        self._shown = now
        pixels = progress.preview().mul(255).round().byte().movedim(0, -1).cpu().numpy()
        return "JPEG", Image.fromarray(pixels), PREVIEW_SIDE
