"""What the editor asks of the pack while a workflow is made: facts and a preview of a video, its cuts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import folder_paths

SURVEYED = 1500
PACK = Path(__file__).parents[1]


def register() -> None:
    """Adds the pack's routes to ComfyUI's server, and its workflows to the templates; nothing where there is no server."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    from aiohttp import web

    # Of a pack that has both, ComfyUI lists what is in workflows/ and serves what is in examples/; what comes first holds.
    server.app.add_routes([web.static(f"/api/workflow_templates/{PACK.name}", PACK / "workflows")])

    async def answer(request: web.Request, work) -> web.Response:
        from ..veo_core.errors import VeoError

        try:
            settings = await request.json()
            return web.json_response(await asyncio.to_thread(work, settings))
        except (VeoError, ValueError, TypeError) as e:
            return web.json_response({"error": str(e)}, status=400)

    @server.routes.post("/veostyle/preview")
    async def preview_clip(request: web.Request) -> web.Response:
        return await answer(request, _preview)

    @server.routes.post("/veostyle/cuts")
    async def cuts_of_clip(request: web.Request) -> web.Response:
        return await answer(request, _cuts)


def _preview(settings: dict) -> dict:
    from ..veo_core.video.preview import preview
    from ..veo_core.video.reader import describe
    from .video import opened

    clip = opened(**settings)
    path = preview(clip, Path(folder_paths.get_temp_directory()))
    return {"facts": describe(clip), "file": path.name, "size": clip.size}


def _cuts(settings: dict) -> dict:
    from ..veo_core.video.scenes import survey
    from .video import opened

    clip = opened(**settings)
    seen = survey(replace(clip, max_frames=min(clip.max_frames or SURVEYED, SURVEYED)))
    cuts = [round(float(seen.times[s.start]), 2) for s in seen.scenes[1:]]
    return {"cuts": cuts, "frames": seen.frames, "seconds": float(seen.duration), "whole": seen.frames < SURVEYED}
