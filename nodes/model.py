"""Model loader."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from comfy_api.latest import io

from .types import CATEGORY, LoadedModel, VeoModel

if TYPE_CHECKING:
    from ..veo_core.backbones import Backbone

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
        import torch

        from ..veo_core.backbones import load_backbone

        return io.NodeOutput(loaded(load_backbone(None, torch.device("cpu"))))


class ModelFromComfy(io.ComfyNode):
    """A MODEL, VAE and CLIP of ComfyUI's own loaders, made coherent over time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        import comfy.samplers

        samplers, schedulers = comfy.samplers.KSampler.SAMPLERS, comfy.samplers.KSampler.SCHEDULERS
        return io.Schema(
            node_id="VeoStyleModelFromComfy",
            display_name="Model from ComfyUI (VeoStyle)",
            category=CATEGORY,
            description="SD 1.5, SDXL, Wan or LTXV from ComfyUI's loaders, with the LoRA, ControlNet and patches on it.",
            inputs=[
                io.Model.Input("model", tooltip="SD 1.5, SDXL, Wan 2.1, Wan 2.2 or LTXV; LoRA loaders go before this."),
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model."),
                io.Clip.Input("clip", tooltip="Reads the style's words; without words, the empty prompt."),
                io.Combo.Input("sampler_name", options=samplers, default="dpmpp_2m", tooltip="As in KSampler."),
                io.Combo.Input("scheduler", options=schedulers, default="karras", tooltip="As in KSampler."),
            ],
            outputs=[VeoModel.Output(display_name="model")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, model, vae, clip, sampler_name, scheduler) -> io.NodeOutput:
        from .comfy_backbone import ComfyBackbone

        identity = ancestry(cls.hidden.prompt or {}, str(cls.hidden.unique_id))
        backbone = ComfyBackbone(model, vae, clip, sampler_name, scheduler, identity)
        return io.NodeOutput(loaded(backbone))


def ancestry(prompt: dict, node_id: str) -> str:
    """A hash of a node and all that it comes from in the queued graph: the same in another session."""

    def described(node: str, above: tuple[str, ...]) -> object:
        entry = prompt.get(node)
        if entry is None or node in above:
            return node
        inputs = {
            name: described(str(value[0]), (*above, node)) if isinstance(value, list) and len(value) == 2 else value
            for name, value in sorted(entry["inputs"].items())
        }
        return [entry["class_type"], inputs]

    return hashlib.sha256(json.dumps(described(node_id, ()), sort_keys=True, default=str).encode()).hexdigest()[:16]


def loaded(backbone: Backbone) -> LoadedModel:
    """An engine around a backbone, its networks under ComfyUI's memory management where core does not move them itself."""
    import comfy.model_management as management
    import comfy.model_patcher
    import torch

    from ..veo_core.engine import Stylizer
    from ..veo_core.motion.flow import load_flow

    engine = Stylizer(backbone, load_flow(torch.device("cpu")))
    wrap = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    device, rest = management.get_torch_device(), management.unet_offload_device()
    modules = [engine.flow] if hasattr(backbone, "model") else [backbone.module, engine.flow]
    return LoadedModel(engine, [wrap(m, load_device=device, offload_device=rest) for m in modules])
