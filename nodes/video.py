"""Videos into clips, and the scenes of a clip."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.latest import io, ui

from .files import example_path, sample_names
from .progress import CanvasMonitor, show_text
from .types import LazyAudio, VeoClip, schema

if TYPE_CHECKING:
    from ..veo_core.video.reader import Clip


def _located(file: str, path: str) -> Path:
    if path:
        return Path(path)
    return example_path(file) or Path(folder_paths.get_annotated_filepath(file))


def opened(
    file: str = "",
    start: float = 0.0,
    duration: float = 0.0,
    force_rate: float = 0.0,
    every_nth: int = 1,
    frame_cap: int = 0,
    width: int = 0,
    height: int = 0,
    fit: str = "crop",
    path: str = "",
) -> Clip:
    """The clip that the inputs of Load Video describe."""
    from ..veo_core.video.reader import open_clip

    return open_clip(
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


class LoadVideo(io.ComfyNode):
    """A piece of a video, described and not held in memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        folder = folder_paths.get_input_directory()
        files = [f for f in os.listdir(folder) if os.path.isfile(os.path.join(folder, f))]
        files = sorted(folder_paths.filter_files_content_types(files, ["video"])) + sample_names()
        return schema(
            ["video loader", "open video", "import video", "trim video", "vhs load video"],
            node_id="VeoStyleLoadVideo",
            display_name="Load Video (VeoStyle)",
            description="Opens a video without loading it: any length takes the same memory.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=files or [""],
                    upload=io.UploadType.video,
                    tooltip="Video in ComfyUI's input folder; upload one, or drop it on the node. Examples come with the pack.",
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
                VeoClip.Output(display_name="clip", tooltip="The piece of video, described and not loaded."),
                io.Audio.Output(
                    display_name="audio", tooltip="Its sound over start and duration; empty where it has none."
                ),
                io.String.Output(display_name="info", tooltip="Size, rate, length and codecs, in words."),
            ],
        )

    @classmethod
    def validate_inputs(cls, file, path=""):
        if path:
            exists = os.path.exists(path)
            return exists or f"path = {path} does not exist; give a video, or leave it empty to use file"
        # What another node gives is not known yet.
        if path is None or file is None:
            return True
        if example_path(file):
            return True
        if not file or not folder_paths.exists_annotated_filepath(file):
            return f"file = {file} is not in ComfyUI's input folder; upload it or choose another"
        return True

    @classmethod
    def fingerprint_inputs(cls, file, path="", **settings):
        from ..veo_core.weights_file import file_state

        return "" if path is None or file is None else file_state(_located(file, path))

    @classmethod
    def execute(cls, **inputs) -> io.NodeOutput:
        from ..veo_core.video.audio import clip_audio
        from ..veo_core.video.reader import describe

        clip = opened(**inputs)
        track = clip_audio(clip)
        return io.NodeOutput(clip, LazyAudio(track) if track else None, describe(clip))


class ClipFromVideo(io.ComfyNode):
    """A VIDEO of ComfyUI or of another pack as a clip; what lies in a file is read from there, frame by frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["video to clip", "convert video"],
            node_id="VeoStyleClipFromVideo",
            display_name="Clip from Video (VeoStyle)",
            description="A VIDEO of any node as a clip, with its audio. A video in a file is not loaded.",
            inputs=[io.Video.Input("video", tooltip="From core's Load Video, or any node that makes a VIDEO.")],
            outputs=[
                VeoClip.Output(display_name="clip", tooltip="The video, described and not loaded."),
                io.Audio.Output(display_name="audio", tooltip="Its sound; empty where it has none."),
            ],
        )

    @classmethod
    def execute(cls, video) -> io.NodeOutput:
        from ..veo_core.video.audio import clip_audio

        clip, audio = clip_of(video)
        track = clip_audio(clip)
        return io.NodeOutput(clip, LazyAudio(track) if track else audio)


class ClipFromImages(io.ComfyNode):
    """A batch of frames as a clip, by way of a lossless file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["images to clip", "frames to video"],
            node_id="VeoStyleClipFromImages",
            display_name="Clip from Images (VeoStyle)",
            description="A batch of frames as a clip.",
            inputs=[
                io.Image.Input("images", tooltip="Frames in order."),
                io.Float.Input("rate", default=24.0, min=0.01, max=240.0, step=0.001, tooltip="Frames per second."),
            ],
            outputs=[VeoClip.Output(display_name="clip", tooltip="The frames, in a lossless file.")],
        )

    @classmethod
    def execute(cls, images, rate) -> io.NodeOutput:
        from ..veo_core.video.reader import exact_rate, open_clip
        from ..veo_core.video.spill import spill_frames

        path = spill_frames(images, exact_rate(rate), Path(folder_paths.get_temp_directory()))
        return io.NodeOutput(open_clip(path))


class Scenes(io.ComfyNode):
    """The scenes of a clip, as the denoiser finds them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["contact sheet", "cut detection", "shot detection", "scene list"],
            node_id="VeoStyleScenes",
            display_name="Scenes (VeoStyle)",
            description="Finds the cuts of a clip: a contact sheet, where each scene begins, and which one it returns to.",
            inputs=[VeoClip.Input("clip", tooltip="The clip to look through.")],
            outputs=[
                io.Image.Output(display_name="sheet", tooltip="The middle frame of each scene."),
                io.String.Output(
                    display_name="scenes",
                    tooltip="How many there are, and a line for each: its seconds, its frames, and the scene that it returns to.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, clip) -> io.NodeOutput:
        from ..veo_core.video.scenes import survey
        from ..veo_core.video.sheet import contact_sheet, describe_scenes

        monitor = CanvasMonitor(cls.hidden.unique_id)
        seen = survey(clip, monitor=monitor)
        sheet = contact_sheet(clip, seen, monitor)[None]
        text = describe_scenes(seen)
        show_text(text, cls.hidden.unique_id)
        return io.NodeOutput(sheet, text, ui=ui.PreviewImage(sheet))


def clip_of(video) -> tuple[Clip, dict | None]:
    """A VIDEO as a clip, and its audio where only the VIDEO holds it."""
    from comfy_api.input_impl import VideoFromComponents

    from ..veo_core.video.reader import open_clip
    from ..veo_core.video.spill import spill_file, spill_frames

    temp = Path(folder_paths.get_temp_directory())
    if isinstance(video, VideoFromComponents):
        parts = video.get_components()
        return open_clip(spill_frames(parts.images, parts.frame_rate, temp)), parts.audio
    source = video.get_stream_source()
    # Trimming a VIDEO came to core after the oldest one that the pack supports.
    start, duration = getattr(video, "get_active_trim_window", lambda: (0, 0))()
    path = Path(source) if isinstance(source, (str, os.PathLike)) else spill_file(source, temp)
    return open_clip(path, start=start, duration=duration), None
