"""Decoder to video."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from .files import output_format, quality_inputs, temporary_path
from .progress import CanvasMonitor
from .types import VeoMemory, VeoModel, schema, track_of, valid

CODECS = ["h264", "h265", "vp9", "av1", "prores4444", "ffv1"]


class VAEDecode(io.ComfyNode):
    """Decodes stylised latents to a video in a file, frame by frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["decode video", "latent to video"],
            node_id="VeoStyleVAEDecode",
            display_name="VAE Decode to Video (VeoStyle)",
            description="Decodes to a video file without holding it in memory. Save it with Save Video (VeoStyle) or core's.",
            inputs=[
                io.Latent.Input("latent", tooltip="From the ST-Norm Denoiser."),
                VeoModel.Input("model", tooltip="The model that made the latent."),
                io.Audio.Input(
                    "audio",
                    optional=True,
                    tooltip="What goes beside the pictures; copied unchanged where it comes from a file and the codec's container "
                    "takes it.",
                ),
                io.Combo.Input(
                    "codec",
                    options=CODECS,
                    default="h264",
                    optional=True,
                    tooltip="Of the video's file. Save Video (VeoStyle) on auto copies it as it is; ffv1 loses nothing.",
                ),
                *quality_inputs(),
                io.Float.Input(
                    "fusion",
                    default=-1.0,
                    min=-1.0,
                    max=1.0,
                    step=0.05,
                    optional=True,
                    tooltip="How much each frame is mixed with the one before along the source's motion: steadier, and closer "
                    "to the source's own motion. 0 shows what the model made; -1 is 1, but 0 at strength 0 and for models that "
                    "attend over time themselves.",
                ),
            ],
            outputs=[
                io.Video.Output(display_name="video", tooltip="In a file; nothing of it is held in memory."),
                VeoMemory.Output(display_name="memory", tooltip="What the run took, for Memory Report."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, codec="h264", crf=-1, deep=False, bitrate=0.0):
        if codec is not None and codec not in CODECS:
            return f"codec = {codec} is no video file; give one of {', '.join(CODECS)}"
        return valid(output_format, codec, crf, deep, bitrate)

    @classmethod
    def execute(
        cls, latent, model, audio=None, codec="h264", crf=-1, deep=False, bitrate=0.0, fusion=-1.0
    ) -> io.NodeOutput:
        from comfy_api.input_impl import VideoFromFile

        from ..veo_core.latents import latents_of
        from ..veo_core.memory.watch import MemoryWatch
        from ..veo_core.render import render

        stylised, memory = latents_of(latent), latent["veo_memory"]
        output = output_format(codec, crf, deep, bitrate)
        path = temporary_path(f"{stylised.clip.path.stem}{output.suffix}")
        model.to_device(max(stylised.plan.stages.values()))
        with MemoryWatch(stylised.plan, CanvasMonitor(cls.hidden.unique_id)) as watch:
            render(
                model.engine,
                stylised,
                path,
                output,
                audio=track_of(audio),
                fusion=None if fusion < 0 else fusion,
                monitor=watch,
            )
        return io.NodeOutput(VideoFromFile(str(path)), replace(memory, traces=(*memory.traces, watch.trace)))
