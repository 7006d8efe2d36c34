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
        from ..veo_core.style.injection import PRESETS

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
                    tooltip="How far to go: 1 is the full style, 0 the plain model. Plain veo-mini gives the source back, "
                    "plain Stable Diffusion the source redrawn after the words.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Of the noise. veo-mini starts from the source and uses none.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default="balanced",
                    optional=True,
                    tooltip="How style pictures enter a model that was not trained with the pack: faithful keeps every edge, "
                    "strong repaints. veo-mini was trained for it and has no presets.",
                ),
                io.Float.Input(
                    "denoise",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="Share of the noise schedule that frames go through; 0 is the preset's own. Not for veo-mini.",
                ),
                io.Boolean.Input(
                    "inversion",
                    default=False,
                    optional=True,
                    tooltip="Start from DDIM inversion of the source in place of fresh noise: closer to it, twice the time. "
                    "For checkpoints of Load Model (VeoStyle).",
                ),
                io.Int.Input(
                    "window",
                    default=0,
                    min=0,
                    max=256,
                    optional=True,
                    tooltip="Frames denoised together; 0 is the model's own. Fewer take less memory.",
                ),
                io.String.Input(
                    "knobs",
                    default="",
                    optional=True,
                    tooltip="Of the preset, set otherwise: query=0.6, temperature=1.2, adain=key_value, sources=self+anchor+next, "
                    "layers=0.2+1, norm=0, ...",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model,
        clip,
        style,
        steps,
        guidance,
        strength,
        seed,
        preset="balanced",
        denoise=0.0,
        inversion=False,
        window=0,
        knobs="",
    ) -> io.NodeOutput:
        from ..veo_core.options import parse_options
        from ..veo_core.store import prune

        options = parse_options(
            preset,
            inversion,
            knobs,
            steps=steps or None,
            guidance=guidance or None,
            strength=strength,
            seed=seed,
            denoise=denoise or None,
            window=window or None,
        )
        folder = Path(folder_paths.get_output_directory()) / ".veostyle"
        prune(folder, keep=8)
        model.to_device(0)
        plan = model.engine.plan(clip, options, model.budget())
        model.to_device(max(plan.stages.values()))
        latents = model.engine.denoise(clip, style, options, folder, plan, CanvasMonitor(cls.hidden.unique_id))
        latents.store.close()
        return io.NodeOutput({"samples": latents.samples, "veo": latents})
