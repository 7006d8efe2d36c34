"""How much memory a run may take, what it will take, and what it took."""

from __future__ import annotations

from comfy_api.latest import io, ui

from .progress import show_text
from .types import VeoClip, VeoMemory, VeoModel, run_options, schema


class MemoryPool(io.ComfyNode):
    """A budget, and the plan that follows from it, shown before anything runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..veo_core.memory.plan import POLICIES
        from ..veo_core.style.injection import PRESETS

        return schema(
            ["vram budget", "low vram", "memory plan", "memory estimate"],
            node_id="VeoStyleMemoryPool",
            display_name="Memory Pool (VeoStyle)",
            description="Sets how much memory a run may take, and shows before it what each stage will take.",
            inputs=[
                VeoModel.Input("model", tooltip="The model that will run."),
                VeoClip.Input(
                    "clip", tooltip="The clip that it will run on; its length does not matter, its size does."
                ),
                io.Float.Input(
                    "budget_gb",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.5,
                    tooltip="GB (10^9 bytes) on the model's device; 0 is what the device has, less 15 %. Too little is refused "
                    "with the smallest that works. The weights count, but for those of Model from ComfyUI.",
                ),
                io.Combo.Input(
                    "policy",
                    options=list(POLICIES),
                    default="fast",
                    tooltip="fast encodes and decodes as many frames at once as fill the chip, lean one. The result is the same.",
                ),
                io.Int.Input("window", default=0, min=0, max=256, optional=True, tooltip="As on the denoiser."),
                io.Float.Input(
                    "guidance", default=0.0, min=0.0, max=50.0, step=0.1, optional=True, tooltip="As on the denoiser."
                ),
                io.Combo.Input(
                    "preset", options=list(PRESETS), default="balanced", optional=True, tooltip="As on the denoiser."
                ),
                io.Int.Input("steps", default=0, min=0, max=1000, optional=True, tooltip="As on the denoiser."),
                io.Float.Input(
                    "strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True, tooltip="As on the denoiser."
                ),
                io.Float.Input(
                    "denoise", default=0.0, min=0.0, max=1.0, step=0.01, optional=True, tooltip="As on the denoiser."
                ),
                io.Boolean.Input("inversion", default=False, optional=True, tooltip="As on the denoiser."),
                io.String.Input("knobs", default="", optional=True, tooltip="As on the denoiser."),
                io.Int.Input("overlap", default=-1, min=-1, max=128, optional=True, tooltip="As on the denoiser."),
            ],
            outputs=[
                VeoMemory.Output(display_name="memory", tooltip="For the denoiser."),
                io.String.Output(display_name="plan", tooltip="The plan in words."),
                io.Image.Output(display_name="picture", tooltip="The plan as stacked bars against the budget."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model,
        clip,
        budget_gb,
        policy,
        window=0,
        guidance=0.0,
        preset="balanced",
        steps=0,
        strength=1.0,
        denoise=0.0,
        inversion=False,
        knobs="",
        overlap=-1,
    ) -> io.NodeOutput:
        from ..veo_core.memory.chart import draw_plan
        from ..veo_core.memory.watch import RunMemory

        memory = RunMemory(int(budget_gb * 1e9) or None, policy)
        options = run_options(
            preset, inversion, knobs, steps, guidance, strength, denoise=denoise, window=window, overlap=overlap
        )
        plan = model.plan(clip, options, memory)
        picture = draw_plan(plan)[None]
        show_text(plan.describe(), cls.hidden.unique_id)
        return io.NodeOutput(memory, plan.describe(), picture, ui=ui.PreviewImage(picture))


class MemoryReport(io.ComfyNode):
    """Planned against measured memory of a run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["memory usage", "vram usage", "memory timeline"],
            node_id="VeoStyleMemoryReport",
            display_name="Memory Report (VeoStyle)",
            description="Memory over time as a run took it, by stage, against what was planned.",
            inputs=[VeoMemory.Input("memory", tooltip="Of VAE Decode to Video, which knows what the run took.")],
            outputs=[
                io.Image.Output(display_name="timeline", tooltip="Memory over time, coloured by stage."),
                io.String.Output(display_name="text", tooltip="Planned and measured peak of each stage."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, memory) -> io.NodeOutput:
        from ..veo_core.memory.chart import draw_report

        picture, text = draw_report(memory)[None], memory.describe()
        show_text(text, cls.hidden.unique_id)
        return io.NodeOutput(picture, text, ui=ui.PreviewImage(picture))
