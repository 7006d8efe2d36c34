"""What is done with a result: saved, held against its source, taken apart into frames."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

import folder_paths
from comfy_api.latest import io, ui

from .files import check_prefix, output_format, quality_inputs, temporary_path, workflow_tags
from .progress import CanvasMonitor, show_text
from .types import VeoClip, schema, track_of, valid
from .video import clip_of

AUTO = "auto"
log = logging.getLogger(__name__)


class Frames(io.ComfyNode):
    """Some frames of a video as pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["video to images", "extract frames", "get frame"],
            node_id="VeoStyleFrames",
            display_name="Frames (VeoStyle)",
            description="Frames of a VIDEO as an IMAGE batch, without decoding what comes after them.",
            inputs=[
                io.Video.Input("video", tooltip="Any VIDEO."),
                io.Int.Input("first", default=0, min=0, max=10_000_000, tooltip="Index of the first frame, from 0."),
                io.Int.Input("count", default=1, min=1, max=100_000, tooltip="How many; fewer where the video ends."),
            ],
            outputs=[io.Image.Output(display_name="images", tooltip="The frames, in order.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, video, first, count) -> io.NodeOutput:
        from ..veo_core.video.reader import read_frames

        clip, _ = clip_of(video)
        return io.NodeOutput(read_frames(clip, first, count, CanvasMonitor(cls.hidden.unique_id)))


class Compare(io.ComfyNode):
    """Source and result in one video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..veo_core.video.compare import LAYOUTS

        return schema(
            ["before and after", "side by side", "split screen", "wipe"],
            node_id="VeoStyleCompare",
            display_name="Compare (VeoStyle)",
            description="Source and result in one video: beside or above each other, or under a moving split.",
            inputs=[
                VeoClip.Input("source", tooltip="The clip that the video was made from."),
                io.Video.Input("video", tooltip="The result; as many frames as the source."),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default="split",
                    tooltip="split sweeps a line over the picture, the source left of it; the others show both whole.",
                ),
            ],
            outputs=[io.Video.Output(display_name="video", tooltip="The comparison, with the result's sound.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, source, video, layout) -> io.NodeOutput:
        from comfy_api.input_impl import VideoFromFile

        from ..veo_core.video.audio import clip_audio
        from ..veo_core.video.compare import compare

        result, audio = clip_of(video)
        path = temporary_path(f"{source.path.stem}_{layout}.mp4")
        sound = clip_audio(result) or track_of(audio)
        compare(source, result, path, layout, audio=sound, monitor=CanvasMonitor(cls.hidden.unique_id))
        return io.NodeOutput(VideoFromFile(str(path)))


class SaveVideo(io.ComfyNode):
    """A video in ComfyUI's output folder, in any format that the engine writes, with the workflow inside."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..veo_core.video.codecs import CODECS

        return schema(
            [
                "export video",
                "write video",
                "video combine",
                "save gif",
                "save webp",
                "save prores",
                "save png sequence",
            ],
            node_id="VeoStyleSaveVideo",
            display_name="Save Video (VeoStyle)",
            description="Saves a VIDEO with its sound; an MP4 or WebM dropped on the canvas brings this workflow back.",
            inputs=[
                io.Video.Input("video", tooltip="Any VIDEO; one in a file is not loaded."),
                io.String.Input(
                    "filename_prefix",
                    default="video/VeoStyle",
                    tooltip="Folder and beginning of the name in ComfyUI's output folder; %year%, %month%, %day%, %width% "
                    "and the like are filled in.",
                ),
                io.Combo.Input(
                    "format",
                    options=[AUTO, *CODECS],
                    default=AUTO,
                    tooltip="auto copies a file of this pack as it is, and keeps the format of others. png and png16 write a "
                    "folder of pictures, prores4444 is for editors, ffv1 is lossless, gif and webp play anywhere.",
                ),
                *quality_inputs(),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where it was saved.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None, format=AUTO, crf=-1, deep=False, bitrate=0.0):
        # What auto will be is known with the video; vp9 takes every quality that it may have.
        settings = valid(output_format, "vp9" if format == AUTO else format, crf, deep, bitrate)
        return settings if settings is not True else valid(check_prefix, filename_prefix)

    @classmethod
    def execute(cls, video, filename_prefix, format, crf=-1, deep=False, bitrate=0.0) -> io.NodeOutput:
        from ..veo_core.video.audio import clip_audio
        from ..veo_core.video.save import save_clip, usual_format

        clip, audio = clip_of(video)
        output = output_format(usual_format(clip).codec if format == AUTO else format, crf, deep, bitrate)
        check_prefix(filename_prefix)
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix.rstrip("/\\"), folder_paths.get_output_directory(), *clip.size
        )
        path = next(
            p for number in count(counter) if not (p := Path(folder) / f"{name}_{number:05}_{output.suffix}").exists()
        )
        sound = clip_audio(clip) or track_of(audio)
        monitor = CanvasMonitor(cls.hidden.unique_id)
        save_clip(clip, path, output, audio=sound, metadata=workflow_tags(cls.hidden), monitor=monitor)
        shown = _shown(path, subfolder, monitor)
        show_text(str(Path(subfolder, path.name)), cls.hidden.unique_id)
        return io.NodeOutput(str(path), ui=ui.PreviewVideo(shown))


def _shown(path: Path, subfolder: str, monitor: CanvasMonitor) -> list[ui.SavedResult]:
    """The saved file; of a folder of pictures the first; before what no browser plays a small copy for the node."""
    from ..veo_core.errors import VeoError
    from ..veo_core.video.preview import plays_in_browser, preview
    from ..veo_core.video.reader import open_clip

    if path.is_dir():
        return [ui.SavedResult("000001.png", f"{subfolder}/{path.name}".lstrip("/"), io.FolderType.output)]
    result = ui.SavedResult(path.name, subfolder, io.FolderType.output)
    try:
        saved = open_clip(path)
        if plays_in_browser(saved):
            return [result]
        copy = preview(saved, Path(folder_paths.get_temp_directory()), monitor)
    except VeoError as e:
        # The file is saved; that it cannot be shown must not say otherwise.
        log.warning("VeoStyle: %s is saved and cannot be shown: %s", path, e)
        return [result]
    return [ui.SavedResult(copy.name, "", io.FolderType.temp), result]
