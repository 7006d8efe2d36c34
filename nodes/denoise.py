"""ST-Norm denoiser."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .progress import CanvasMonitor
from .types import CATEGORY, VeoClip, VeoModel, VeoStyle


class STNormDenoiser(io.ComfyNode):
    """Stylises the latents of a clip, window by window, into a folder from which an interrupted run goes on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleSTNormDenoiser",
            display_name="ST-Norm Denoiser (VeoStyle)",
            category=CATEGORY,
            description="Stylises a clip so that the style holds still; an interrupted run goes on where it stopped.",
            inputs=[
                VeoModel.Input("model"),
                VeoClip.Input("clip"),
                VeoStyle.Input("style"),
                io.Int.Input(
                    "steps", default=0, min=0, max=1000, tooltip="Denoising steps; 0 is the model's own number."
                ),
                io.Float.Input(
                    "guidance",
                    default=0.0,
                    min=0.0,
                    max=50.0,
                    step=0.1,
                    tooltip="Classifier-free guidance scale; 1 is off, 0 is the model's own.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How far to go: 0 is the source, 1 the full style.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Of the noise. veo-mini starts from the source and uses none.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, clip, style, steps, guidance, strength, seed) -> io.NodeOutput:
        from ..veo_core.options import parse_options
        from ..veo_core.store import prune

        options = parse_options(steps=steps or None, guidance=guidance or None, strength=strength, seed=seed)
        folder = Path(folder_paths.get_output_directory()) / ".veostyle"
        prune(folder, keep=8)
        model.to_device(0)
        plan = model.engine.plan(clip, options, model.budget())
        model.to_device(max(plan.stages.values()))
        latents = model.engine.denoise(clip, style, options, folder, plan, CanvasMonitor(cls.hidden.unique_id))
        latents.store.close()
        return io.NodeOutput({"samples": latents.samples, "veo": latents})
