"""Model loader."""

from __future__ import annotations

from comfy_api.latest import io

from .types import CATEGORY, LoadedModel, VeoModel

BUNDLED = "veo-mini"


class LoadModel(io.ComfyNode):
    """A model of the pack, under ComfyUI's own memory management."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleLoadModel",
            display_name="Load Model (VeoStyle)",
            category=CATEGORY,
            description="veo-mini comes with the pack and works offline.",
            inputs=[
                io.Combo.Input(
                    "model", options=[BUNDLED], default=BUNDLED, tooltip="veo-mini is small and runs on a laptop."
                )
            ],
            outputs=[VeoModel.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        import comfy.model_management as management
        import comfy.model_patcher
        import torch

        from ..veo_core.backbones import load_backbone
        from ..veo_core.engine import Stylizer
        from ..veo_core.motion.flow import load_flow

        engine = Stylizer(load_backbone(None, torch.device("cpu")), load_flow(torch.device("cpu")))
        wrap = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        device, rest = management.get_torch_device(), management.unet_offload_device()
        modules = (engine.backbone.module, engine.flow)
        return io.NodeOutput(LoadedModel(engine, [wrap(m, load_device=device, offload_device=rest) for m in modules]))
