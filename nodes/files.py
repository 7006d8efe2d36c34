"""What nodes write: where, in which format, with which tags."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.latest import io

if TYPE_CHECKING:
    from ..veo_core.video.codecs import OutputFormat


def temporary_path(name: str) -> Path:
    """A new place in ComfyUI's temporary folder; nothing is there yet."""
    temp = Path(folder_paths.get_temp_directory())
    temp.mkdir(parents=True, exist_ok=True)
    # Names have a limit of 255 bytes, of which a letter takes up to four.
    return temp / f"veostyle_{uuid.uuid4().hex[:8]}_{name[-50:]}"


def quality_inputs() -> list:
    """The inputs that :func:`output_format` reads."""
    return [
        io.Int.Input(
            "crf",
            default=-1,
            min=-1,
            max=63,
            optional=True,
            tooltip="Quality of h264, h265, vp9 and av1, which alone have one; lower is better, -1 is the usual one.",
        ),
        io.Boolean.Input(
            "deep", default=False, optional=True, tooltip="10 bits a colour; not for png, png16, gif and webp."
        ),
    ]


def output_format(codec: str, crf: int, deep: bool) -> OutputFormat:
    """A format of the engine's writer; a crf below 0 is the usual one."""
    from ..veo_core.video.codecs import OutputFormat

    return OutputFormat(codec, None if crf < 0 else crf, deep=deep)


def workflow_tags(hidden: io.HiddenHolder) -> dict[str, str]:
    """The prompt and the workflow as text tags, unless ComfyUI was started with metadata off."""
    from comfy.cli_args import args

    if args.disable_metadata:
        return {}
    parts = {**(hidden.extra_pnginfo or {}), **({"prompt": hidden.prompt} if hidden.prompt else {})}
    return {name: json.dumps(value) for name, value in parts.items()}
