"""What the editor asks of the pack while a workflow is made: facts and a preview of a video, its cuts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import folder_paths

SURVEYED = 1500
PACK = Path(__file__).parents[1]


class Superseded(Exception):
    """The same node of the same editor has asked for something else."""


class Jobs:
    """Work for the editor on two threads of its own, of which a newer request of the same asker ends the older.

    ComfyUI's server serves its files on the threads that asyncio has; long videos must not fill those.
    """

    def __init__(self):
        self._threads = ThreadPoolExecutor(2, "veostyle")
        self._newest: dict[tuple[str, str], object] = {}

    async def run(self, kind: str, asker: str, work: Callable[[Callable], dict]) -> dict:
        """The result of ``work(check)``, which calls ``check`` often; it raises Superseded."""
        own = self._newest[kind, asker] = object()

        def check(*_: object) -> None:
            if self._newest.get((kind, asker)) is not own:
                raise Superseded

        def checked() -> dict:
            check()
            return work(check)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, checked)
        finally:
            if self._newest.get((kind, asker)) is own:
                del self._newest[kind, asker]


def register() -> None:
    """Adds the pack's routes to ComfyUI's server, and its workflows to the templates; nothing where there is no server."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    from aiohttp import web

    # Of a pack that has both, ComfyUI lists what is in workflows/ and serves what is in examples/; what comes first holds.
    if (PACK / "workflows").is_dir():
        server.app.add_routes([web.static(f"/api/workflow_templates/{PACK.name}", PACK / "workflows")])
    jobs = Jobs()

    def answering(kind: str, work: Callable[[dict, Callable], dict]) -> None:
        @server.routes.post(f"/veostyle/{kind}")
        async def answer(request: web.Request) -> web.Response:
            from ..veo_core.errors import VeoError

            try:
                asked = await request.json()
                asker, settings = str(asked["asker"]), dict(asked["settings"])
                return web.json_response(await jobs.run(kind, asker, lambda check: work(settings, check)))
            except Superseded:
                return web.json_response({"error": "superseded"}, status=409)
            except KeyError as e:
                return web.json_response({"error": f"{e} is missing"}, status=400)
            except (VeoError, ValueError, TypeError, AttributeError, OSError) as e:
                return web.json_response({"error": str(e)}, status=400)

    answering("preview", _preview)
    answering("cuts", _cuts)


def _preview(settings: dict, check: Callable) -> dict:
    from ..veo_core.video.preview import preview
    from ..veo_core.video.reader import describe
    from .video import opened

    clip = opened(**settings)
    path = preview(clip, Path(folder_paths.get_temp_directory()), check)
    return {"facts": describe(clip), "file": path.name}


def _cuts(settings: dict, check: Callable) -> dict:
    from ..veo_core.video.preview import beginning
    from ..veo_core.video.scenes import survey
    from .video import opened

    clip = opened(**settings)
    part = beginning(clip, SURVEYED)
    seen = survey(part, monitor=check)
    cuts = [round(float(seen.times[s.start]), 2) for s in seen.scenes[1:]]
    whole = seen.frames < SURVEYED and (clip.duration == part.duration or seen.duration < part.duration)
    return {"cuts": cuts, "frames": seen.frames, "seconds": float(seen.duration), "whole": whole}
