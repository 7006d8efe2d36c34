"""A ComfyUI editor in a browser without a window: for making workflows and pictures of them, and for tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of the editor's workflows by that of the queue's: file names are what the editor's Templates show. Those that need no
# other model come first.
TITLES = {
    "stylize_video": "01 Stylize a video",
    "before_and_after": "02 Before and after",
    "two_styles_over_scenes": "03 Two styles over scenes",
    "long_film": "04 Long film",
    "low_memory": "05 Low memory",
    "core_nodes": "06 With nodes of core",
    "style_by_text": "07 Style by text (needs SD 1.5)",
    "own_checkpoint_sd15": "08 Your own checkpoint (needs SD 1.5)",
    "lora_hot_swap": "09 LoRAs one after another (needs SD 1.5 and LoRAs)",
    "ip_adapter": "10 IP-Adapter (needs SD 1.5 and IP-Adapter)",
    "comfyui_model_sd": "11 Model of ComfyUI (needs SD 1.5)",
    "own_checkpoint_sdxl": "12 Your own checkpoint (needs SDXL)",
    "comfyui_model_wan": "13 Model of ComfyUI (needs Wan 2.1)",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
READY = "window.app?.graph && window.LiteGraph && Object.keys(LiteGraph.registered_node_types).length > 50"
FOLLOW = """() => { window.ended = null;
  for (const event of ["execution_success", "execution_error", "execution_interrupted"])
    app.api.addEventListener(event, (e) => { window.ended = [event, e.detail]; }); }"""


def browser_path() -> str | None:
    """A Chromium on this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Editor:
    """The page of a running ComfyUI.

    Args:
        page: of playwright. url: of the server. locale: of the interface.
    """

    def __init__(self, page, url: str, locale: str | None = None):
        self.page, self.errors = page, []
        page.on("pageerror", lambda e: self.errors.append(f"{e}\n{getattr(e, 'stack', '')}"))
        page.goto(url, wait_until="load")
        page.wait_for_function(READY, timeout=120_000)
        page.wait_for_timeout(2000)
        if locale:
            page.evaluate("l => app.extensionManager.setting.set('Comfy.Locale', l)", locale)
            page.reload(wait_until="load")
            page.wait_for_function(READY, timeout=120_000)
            page.wait_for_timeout(2000)
        page.keyboard.press("Escape")
        page.evaluate(FOLLOW)

    def drop(self, file: Path, kind: str = "application/json", x: float | None = None, y: float | None = None) -> None:
        """Drops a file on the canvas, at a place of the page where one is given."""
        script = """async ([bytes, name, type, x, y]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], name, { type }));
          const canvas = document.querySelector("#graph-canvas");
          const place = x == null ? {} : { clientX: x, clientY: y };
          for (const event of ["dragover", "drop"])
            canvas.dispatchEvent(new DragEvent(event, { dataTransfer: data, bubbles: true, cancelable: true, ...place }));
        }"""
        self.page.evaluate(script, [list(file.read_bytes()), file.name, kind, x, y])
        self.page.wait_for_timeout(3000)

    def run(self, seconds: float = 600) -> tuple[str, dict]:
        """Presses Run and waits: the event that ended it, and its detail."""
        self.start()
        self.page.wait_for_function("window.ended", timeout=seconds * 1000)
        self.page.wait_for_timeout(3000)
        return tuple(self.page.evaluate("window.ended"))

    def start(self) -> None:
        """Presses Run."""
        self.page.evaluate("() => { window.ended = null; }")
        button = self.page.locator('[data-testid="queue-button"]').first
        (button if button.count() else self.page.get_by_role("button", name="Run").first).click()

    def types(self) -> list[str]:
        """The types of the nodes on the canvas."""
        return self.page.evaluate("app.graph.nodes.map(n => n.type)")

    def prompt(self) -> dict:
        """The graph as it would be queued."""
        return self.page.evaluate("async () => (await app.graphToPrompt()).output")

    def workflow(self) -> dict:
        """The graph as it would be saved."""
        return json.loads(self.page.evaluate("JSON.stringify(app.graph.serialize())"))

    def fit(self) -> None:
        """Brings the whole graph into view."""
        self.page.evaluate("app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_timeout(1200)


@contextmanager
def opened(url: str, size: tuple[int, int] = (1600, 900), locale: str | None = None) -> Iterator[Editor]:
    """An editor for a while."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu", "--use-gl=swiftshader"]
        )
        try:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            yield Editor(page, url, locale)
        finally:
            browser.close()
