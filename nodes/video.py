"""Video loader."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .types import CATEGORY, LazyAudio, VeoClip


def _located(file: str, path: str) -> Path:
    return Path(path) if path else Path(folder_paths.get_annotated_filepath(file))


class LoadVideo(io.ComfyNode):
    """A piece of a video, described and not held in memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        folder = folder_paths.get_input_directory()
        files = [f for f in os.listdir(folder) if os.path.isfile(os.path.join(folder, f))]
        files = sorted(folder_paths.filter_files_content_types(files, ["video"]))
        return io.Schema(
            node_id="VeoStyleLoadVideo",
            display_name="Load Video (VeoStyle)",
            category=CATEGORY,
            description="Opens a video without loading it: any length takes the same memory.",
            inputs=[
                io.Combo.Input(
                    "file", options=files, upload=io.UploadType.video, tooltip="Video in ComfyUI's input folder."
                ),
                io.Float.Input("start", default=0.0, min=0.0, max=1e6, step=0.01, tooltip="Seconds to skip."),
                io.Float.Input(
                    "duration", default=0.0, min=0.0, max=1e6, step=0.01, tooltip="Seconds to take; 0 takes the rest."
                ),
                io.Float.Input(
                    "force_rate",
                    default=0.0,
                    min=0.0,
                    max=240.0,
                    step=0.001,
                    tooltip="Frames per second to read at; 0 keeps every frame and its own time.",
                ),
                io.Int.Input(
                    "every_nth", default=1, min=1, max=1000, tooltip="Take one frame in so many, after force_rate."
                ),
                io.Int.Input(
                    "frame_cap", default=0, min=0, max=10_000_000, tooltip="Take at most so many frames; 0 takes all."
                ),
                io.Int.Input(
                    "width", default=0, min=0, max=16384, tooltip="Pixels; 0 follows the height with the aspect kept."
                ),
                io.Int.Input(
                    "height", default=0, min=0, max=16384, tooltip="Pixels; 0 follows the width with the aspect kept."
                ),
                io.Combo.Input(
                    "fit",
                    options=["crop", "pad", "stretch"],
                    default="crop",
                    tooltip="What to do when both sides are given and the aspect differs.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    optional=True,
                    tooltip="Full path of a video or a folder of stills, in place of file.",
                ),
            ],
            outputs=[
                VeoClip.Output(display_name="clip"),
                io.Audio.Output(display_name="audio"),
                io.String.Output(display_name="info"),
            ],
        )

    @classmethod
    def validate_inputs(cls, file, path=""):
        if path:
            return (
                True
                if os.path.exists(path)
                else f"path = {path} does not exist; give a video, or leave it empty to use file"
            )
        if not file or not folder_paths.exists_annotated_filepath(file):
            return f"file = {file} is not in ComfyUI's input folder; upload it or choose another"
        return True

    @classmethod
    def fingerprint_inputs(cls, file, path="", **settings):
        from ..veo_core.engine import source_identity

        return str(source_identity(_located(file, path)))

    @classmethod
    def execute(
        cls, file, start, duration, force_rate, every_nth, frame_cap, width, height, fit, path=""
    ) -> io.NodeOutput:
        from ..veo_core.video.audio import clip_audio
        from ..veo_core.video.reader import describe, open_clip

        clip = open_clip(
            _located(file, path),
            start=start,
            duration=duration,
            rate=force_rate,
            every_nth=every_nth,
            max_frames=frame_cap,
            width=width,
            height=height,
            fit=fit,
        )
        track = clip_audio(clip)
        return io.NodeOutput(clip, LazyAudio(track) if track else None, describe(clip))
