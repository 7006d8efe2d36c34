"""Decoder to video."""

from __future__ import annotations

import tempfile
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .progress import CanvasMonitor
from .types import CATEGORY, LazyAudio, VeoModel


class VAEDecode(io.ComfyNode):
    """Decodes stylised latents to a video in a file, frame by frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleVAEDecode",
            display_name="VAE Decode to Video (VeoStyle)",
            category=CATEGORY,
            description="Decodes to a video file without holding it in memory. Save or preview it with ComfyUI's own nodes.",
            inputs=[
                io.Latent.Input("latent", tooltip="From the ST-Norm Denoiser."),
                VeoModel.Input("model", tooltip="The model that made the latent."),
                io.Audio.Input(
                    "audio",
                    optional=True,
                    tooltip="What goes beside the pictures; copied unchanged when it comes from Load Video (VeoStyle).",
                ),
            ],
            outputs=[io.Video.Output(display_name="video")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, latent, model, audio=None) -> io.NodeOutput:
        from comfy_api.input_impl import VideoFromFile

        from ..veo_core.engine import latents_of
        from ..veo_core.render import render
        from ..veo_core.video.audio import Waveform

        stylised = latents_of(latent)
        if isinstance(audio, LazyAudio):
            audio = audio.track
        elif audio is not None:
            audio = Waveform(audio["waveform"][0].float().cpu().numpy(), audio["sample_rate"])
        temp = Path(folder_paths.get_temp_directory())
        temp.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="veostyle_", dir=temp))
        model.to_device(max(stylised.plan.stages.values()))
        monitor = CanvasMonitor(cls.hidden.unique_id)
        path = render(model.engine, stylised, folder / f"{stylised.clip.path.stem}.mp4", audio=audio, monitor=monitor)
        return io.NodeOutput(VideoFromFile(str(path)))
