"""The engine's progress on the canvas: the node's bar and a line of text, a preview as frames form, and interruption."""

from __future__ import annotations

import time
from collections.abc import Callable

import comfy.model_management
import comfy.utils
from PIL import Image

PREVIEW_EVERY = 0.5
PREVIEW_SIDE = 512
TITLES = {"survey": "looking for cuts", "encode": "encoding", "denoise": "stylising", "decode": "decoding"}


def show_text(text: str, node_id: str | None) -> None:
    """A text under the widgets of a node."""
    from server import PromptServer

    if node_id is not None and getattr(PromptServer, "instance", None):
        PromptServer.instance.send_progress_text(text, node_id)


class CanvasMonitor:
    """A monitor for the engine. Interrupting in ComfyUI raises here, before the next step or chunk."""

    def __init__(self, node_id: str | None = None):
        self._bars: dict[str, comfy.utils.ProgressBar] = {}
        self._begun: dict[str, tuple[float, int]] = {}
        self._shown = self._told = 0.0
        self._stage, self._at = "", None
        self._node_id = node_id

    def __call__(self, progress) -> None:
        self._advance(progress.stage, progress.done, progress.total, progress.preview)

    def counter(self, stage: str) -> Callable[[int, int], None]:
        """The same for work that counts frames: told how many of how many are done."""
        return lambda done, total: self._advance(stage, done, total, None)

    def _advance(self, stage: str, done: int, total: int, preview: Callable | None) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._tell(stage, done, total)
        # Encoding takes turns with denoising: the bar is that of the frames that are through both.
        if not total or stage == "encode" or (preview is None and (stage, done) == self._at):
            return
        self._at = (stage, done)
        if stage not in self._bars:
            self._bars[stage] = comfy.utils.ProgressBar(total, node_id=self._node_id)
        self._bars[stage].update_absolute(done, total, self._preview(preview))

    def _tell(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun, first = self._begun.setdefault(stage, (now, done))
        at_end = 0 < done == total and (stage, done) != self._at
        if stage == self._stage and not at_end and now - self._told < PREVIEW_EVERY:
            return
        self._stage, self._told = stage, now
        parts = [TITLES.get(stage, stage)]
        if done or total:
            parts[0] += f": frame {done}" + (f" of {total}" if total else "")
        if done > first and now - begun > PREVIEW_EVERY and stage != "encode":
            speed = (done - first) / (now - begun)
            parts.append(f"{speed:.1f} fps")
            if total > done:
                minutes, seconds = divmod(round((total - done) / speed), 60)
                parts.append(f"{minutes}:{seconds:02} left")
        show_text(", ".join(parts), self._node_id)

    def _preview(self, preview: Callable | None):
        now = time.monotonic()
        if preview is None or now - self._shown < PREVIEW_EVERY:
            return None
        self._shown = now
        pixels = preview().mul(255).round().byte().movedim(0, -1).cpu().numpy()
        return "JPEG", Image.fromarray(pixels), PREVIEW_SIDE
