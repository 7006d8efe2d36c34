"""The engine's progress on the canvas: the node's bar and a line of text, a preview as frames form, and interruption."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.utils
from PIL import Image

if TYPE_CHECKING:
    from ..veo_core.progress import Progress

TOLD_EVERY = PREVIEW_EVERY = 0.5
PREVIEW_SIDE = 512


def show_text(text: str, node_id: str | None) -> None:
    """A text under the widgets of a node."""
    from server import PromptServer

    if node_id is not None and getattr(PromptServer, "instance", None):
        PromptServer.instance.send_progress_text(text, node_id)


class CanvasMonitor:
    """A monitor for the engine. Interrupting in ComfyUI raises here, before the next step or chunk."""

    def __init__(self, node_id: str | None = None):
        from ..veo_core.progress import Pace

        self._pace, self._node_id = Pace(), node_id
        self._bars: dict[str, comfy.utils.ProgressBar] = {}
        self._shown = self._told = 0.0
        self._stage, self._at = "", None

    def __call__(self, progress: Progress) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        progress = self._pace.seen(progress)
        stage, done, total = progress.stage, progress.done, progress.total
        self._tell(progress)
        if not total or (progress.preview is None and (stage, done) == self._at):
            return
        self._at = (stage, done)
        if stage not in self._bars:
            self._bars[stage] = comfy.utils.ProgressBar(total, node_id=self._node_id)
        self._bars[stage].update_absolute(done, total, self._preview(progress.preview))

    def _tell(self, progress: Progress) -> None:
        now, stage, done = time.monotonic(), progress.stage, progress.done
        at_end = 0 < done == progress.total and (stage, done) != self._at
        if stage == self._stage and not at_end and now - self._told < TOLD_EVERY:
            return
        self._stage, self._told = stage, now
        show_text(self._pace.line(progress), self._node_id)

    def _preview(self, preview: Callable | None):
        now = time.monotonic()
        if preview is None or now - self._shown < PREVIEW_EVERY:
            return None
        self._shown = now
        pixels = preview().mul(255).round().byte().movedim(0, -1).cpu().numpy()
        return "JPEG", Image.fromarray(pixels), PREVIEW_SIDE
