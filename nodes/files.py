"""What nodes write: where, in which format, with which tags."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.latest import io

if TYPE_CHECKING:
    from ..veo_core.video.codecs import OutputFormat


EXAMPLE = "example: "
_EXAMPLES = Path(__file__).parents[1] / "examples"
_SAMPLES = {"city": "city.mp4", "bunny": "bunny.mp4"}
_PAINTINGS = {"great wave": "great_wave.jpg", "van gogh": "van_gogh.jpg"}


def sample_names() -> list[str]:
    """The videos that come with the pack, as they are offered in a list."""
    return [EXAMPLE + name for name, file in _SAMPLES.items() if (_EXAMPLES / file).is_file()]


def painting_names() -> list[str]:
    """The paintings that come with the pack, as they are offered in a list."""
    return [EXAMPLE + name for name, file in _PAINTINGS.items() if (_EXAMPLES / file).is_file()]


def example_path(name: str | None) -> Path | None:
    """Where what a list offers of the pack's own is; None for any other name."""
    file = (_SAMPLES | _PAINTINGS).get((name or "").removeprefix(EXAMPLE))
    return _EXAMPLES / file if file and name.startswith(EXAMPLE) else None


def temporary_path(name: str) -> Path:
    """A new place in ComfyUI's temporary folder; nothing is there yet."""
    temp = Path(folder_paths.get_temp_directory())
    temp.mkdir(parents=True, exist_ok=True)
    # Names have a limit of 255 bytes, of which a letter takes up to four.
    return temp / f"veostyle_{uuid.uuid4().hex[:8]}_{name[-50:]}"


def check_prefix(prefix: str) -> None:
    """Raises OutputError for a beginning of a file's name that leads out of ComfyUI's output folder, or is too long."""
    from ..veo_core.errors import OutputError
    from ..veo_core.video.writer import NAME_BYTES

    root = Path(folder_paths.get_output_directory()).resolve()
    path = (root / prefix).resolve()
    if not path.is_relative_to(root) or "\0" in prefix:
        raise OutputError(f"filename_prefix = {prefix} leads out of ComfyUI's output folder; give a name inside it")
    if not prefix.strip("/\\ "):
        raise OutputError("filename_prefix is empty; give a name, such as video/VeoStyle")
    # Room for a counter and an ending; placeholders such as %date% stand for about as much as they are long.
    if any(len(os.fsencode(part)) > NAME_BYTES - 24 for part in path.relative_to(root).parts):
        raise OutputError(f"filename_prefix = {prefix} has a name longer than {NAME_BYTES - 24} bytes; shorten it")
    at_file = next((p for p in path.parents if p.is_relative_to(root) and p.is_file()), None)
    if at_file:
        raise OutputError(f"filename_prefix = {prefix}: {at_file} is a file, not a folder; give another")


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
        io.Float.Input(
            "bitrate",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            optional=True,
            tooltip="Megabits per second in place of a quality, for h264, h265, vp9 and av1; 0 goes by quality.",
        ),
    ]


def output_format(codec: str, crf: int, deep: bool, bitrate: float = 0.0) -> OutputFormat:
    """A format of the engine's writer; a crf below 0 is the usual one, a bitrate (Mbit/s) of 0 none."""
    from ..veo_core.video.codecs import OutputFormat

    return OutputFormat(codec, None if crf < 0 else crf, round(bitrate * 1e6) or None, deep)


def workflow_tags(hidden: io.HiddenHolder) -> dict[str, str]:
    """The prompt and the workflow as text tags, unless ComfyUI was started with metadata off."""
    from comfy.cli_args import args

    if args.disable_metadata:
        return {}
    parts = {**(hidden.extra_pnginfo or {}), **({"prompt": hidden.prompt} if hidden.prompt else {})}
    return {name: json.dumps(value) for name, value in parts.items()}
