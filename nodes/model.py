"""Models: bundled, checkpoints, ComfyUI's own; and what is put on them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.latest import io

from .progress import show_text
from .types import LoadedModel, VeoModel, patcher_of, schema, valid

if TYPE_CHECKING:
    from ..veo_core.backbones import Backbone
    from ..veo_core.backbones.stable_diffusion.backbone import StableDiffusionBackbone

BUNDLED, NONE, AUTO = "veo-mini", "none", "auto"
SAMPLER = "dpmpp_2m"
# Core has no folder of its own for them; this is where other packs keep theirs.
ADAPTERS = "ipadapter"
folder_paths.add_model_folder_path(ADAPTERS, str(Path(folder_paths.models_dir) / ADAPTERS))


class LoadModel(io.ComfyNode):
    """A model of the pack or a checkpoint, under ComfyUI's own memory management."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..veo_core.layers.fp8 import WEIGHT_DTYPES
        from ..veo_core.sampling.schedule import PREDICTIONS, SAMPLERS, SPACINGS

        return schema(
            ["load checkpoint", "veo-mini", "animatediff", "sd15", "sdxl"],
            node_id="VeoStyleLoadModel",
            display_name="Load Model (VeoStyle)",
            description="veo-mini comes with the pack and works offline; SD 1.5 and SDXL checkpoints are yours.",
            inputs=[
                io.Combo.Input(
                    "model",
                    options=[BUNDLED, *weight_files("checkpoints")],
                    default=BUNDLED,
                    tooltip="veo-mini is small and runs on a laptop; others are SD 1.5 or SDXL checkpoints.",
                ),
                io.Combo.Input(
                    "sampler",
                    options=list(SAMPLERS),
                    default=SAMPLER,
                    optional=True,
                    tooltip="For Stable Diffusion; veo-mini has its own.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=[AUTO, *SPACINGS],
                    default=AUTO,
                    optional=True,
                    tooltip="Spacing of the noise levels; auto is what suits the sampler and the checkpoint.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    optional=True,
                    tooltip="A file or a diffusers folder anywhere on this machine, in place of the list.",
                ),
                io.String.Input(
                    "motion_module",
                    default="",
                    optional=True,
                    tooltip="Path of AnimateDiff motion modules for SD 1.5 (safetensors or a diffusers folder).",
                ),
                io.Combo.Input(
                    "prediction",
                    options=[AUTO, *PREDICTIONS],
                    default=AUTO,
                    optional=True,
                    tooltip="What the checkpoint was trained to predict; auto goes by its marks. If results look burnt, it is "
                    "another.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=[AUTO, *WEIGHT_DTYPES],
                    default=AUTO,
                    optional=True,
                    tooltip="fp8_e4m3fn keeps the linear layers of a checkpoint, and of an IP-Adapter's image encoder on it, at "
                    "half the bytes; results differ a little.",
                ),
            ],
            outputs=[VeoModel.Output(display_name="model", tooltip="For the denoiser and the decoder.")],
        )

    @classmethod
    def validate_inputs(cls, model, path="", motion_module=""):
        problems = [missing(path=path, motion_module=motion_module)]
        if path == "" and model != BUNDLED:
            problems.append(unlisted("checkpoints", "model", model))
        return first_of(problems)

    @classmethod
    def fingerprint_inputs(cls, model, path="", motion_module="", **settings):
        return states(chosen("checkpoints", model, path), motion_module)

    @classmethod
    def execute(
        cls, model, sampler=SAMPLER, scheduler=AUTO, path="", motion_module="", prediction=AUTO, weight_dtype=AUTO
    ) -> io.NodeOutput:
        import comfy.model_management as management
        import torch

        from ..veo_core.backbones import load_backbone

        cpu = torch.device("cpu")
        dtype = torch.float16 if management.get_torch_device().type == "cuda" else torch.float32
        if model == BUNDLED and not path:
            return io.NodeOutput(loaded(load_backbone(None, cpu, dtype)))
        file = Path(path) if path else Path(folder_paths.get_full_path_or_raise("checkpoints", model))
        backbone = load_backbone(
            file,
            cpu,
            dtype,
            sampler=None if sampler == SAMPLER else sampler,
            scheduler=None if scheduler == AUTO else scheduler,
            prediction=None if prediction == AUTO else prediction,
            motion=Path(motion_module) if motion_module else None,
            weight_dtype=None if weight_dtype == AUTO else weight_dtype,
        )
        return io.NodeOutput(loaded(backbone))


class LoRAInjector(io.ComfyNode):
    """A LoRA beside the weights of a checkpoint, never merged; any number after one another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["load lora", "lora loader", "lycoris", "dora"],
            node_id="VeoStyleLoRAInjector",
            display_name="LoRA Injector (VeoStyle)",
            description="kohya, diffusers, PEFT and LyCORIS (LoHa, LoKr), DoRA too, on a checkpoint of Load Model (VeoStyle).",
            inputs=[
                VeoModel.Input("model", tooltip="A checkpoint of Load Model, with other LoRAs on it or none."),
                io.Combo.Input(
                    "lora",
                    options=[NONE, *weight_files("loras")],
                    default=NONE,
                    tooltip="From ComfyUI's loras folder; or give a path.",
                ),
                io.Float.Input(
                    "strength", default=1.0, min=-10.0, max=10.0, step=0.05, tooltip="0 is off, 1 as trained."
                ),
                io.String.Input(
                    "steps",
                    default="",
                    optional=True,
                    tooltip="Factor over the steps from 0 to 1, such as 0:1, 0.5:0.2; empty is 1 throughout.",
                ),
                io.String.Input(
                    "scenes",
                    default="",
                    optional=True,
                    tooltip="Factor for each scene in order, such as 1, 0.5; later scenes take the last. Empty is 1.",
                ),
                io.String.Input(
                    "path", default="", optional=True, tooltip="A file or PEFT folder anywhere, in place of the list."
                ),
            ],
            outputs=[
                VeoModel.Output(display_name="model", tooltip="The model with this LoRA beside its weights."),
                io.String.Output(display_name="report", tooltip="Which of the file's keys found their place."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, lora, steps="", scenes="", path=""):
        from ..veo_core.lora.injector import parse_scenes, parse_steps

        problems = [missing(path=path), valid(parse_steps, steps), valid(parse_scenes, scenes)]
        if path == "":
            problems.append(unlisted("loras", "lora", lora))
        return first_of(problems)

    @classmethod
    def fingerprint_inputs(cls, lora, path="", **settings):
        return states(chosen("loras", lora, path))

    @classmethod
    def execute(cls, model, lora, strength, steps="", scenes="", path="") -> io.NodeOutput:
        file = Path(path) if path else Path(folder_paths.get_full_path_or_raise("loras", lora))
        changed = adaptable(model, "LoRA", "ComfyUI's LoraLoader before Model from ComfyUI").with_lora(
            file, strength, steps, scenes
        )
        report = changed.loras[-1].report
        show_text(report, cls.hidden.unique_id)
        return io.NodeOutput(model.with_backbone(changed), report)


class IPAdapterLoader(io.ComfyNode):
    """Style pictures through CLIP into a checkpoint's cross-attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["ipadapter", "image prompt", "instantstyle"],
            node_id="VeoStyleIPAdapter",
            display_name="IP-Adapter (VeoStyle)",
            description="Style pictures through an IP-Adapter (plain or plus) on a checkpoint of Load Model (VeoStyle).",
            inputs=[
                VeoModel.Input("model", tooltip="A checkpoint of Load Model."),
                io.String.Input(
                    "path", default="", tooltip="An IP-Adapter anywhere on this machine, in place of the list."
                ),
                io.Combo.Input(
                    "clip_vision",
                    options=weight_files("clip_vision") or [""],
                    tooltip="The image encoder it was made with: ViT-H, or ViT-bigG.",
                ),
                io.Combo.Input(
                    "blocks",
                    options=["all", "style"],
                    default="style",
                    tooltip="style leaves layout to the source (InstantStyle), all copies more of the style picture.",
                ),
                io.Combo.Input(
                    "ip_adapter",
                    options=[NONE, *weight_files(ADAPTERS)],
                    default=NONE,
                    optional=True,
                    tooltip="From the ipadapter folder of ComfyUI's models, safetensors; or give a path.",
                ),
            ],
            outputs=[VeoModel.Output(display_name="model", tooltip="The model with the adapter.")],
        )

    @classmethod
    def validate_inputs(cls, path, clip_vision, ip_adapter=NONE):
        problems = [missing(path=path), unlisted("clip_vision", "clip_vision", clip_vision)]
        if path == "":
            problems.append(unlisted(ADAPTERS, "ip_adapter", ip_adapter))
        return first_of(problems)

    @classmethod
    def fingerprint_inputs(cls, path, clip_vision, ip_adapter=NONE, **settings):
        return states(chosen(ADAPTERS, ip_adapter, path), chosen("clip_vision", clip_vision))

    @classmethod
    def execute(cls, model, path, clip_vision, blocks, ip_adapter=NONE) -> io.NodeOutput:
        file = Path(path) if path else Path(folder_paths.get_full_path_or_raise(ADAPTERS, ip_adapter))
        encoder = Path(folder_paths.get_full_path_or_raise("clip_vision", clip_vision))
        changed = adaptable(model, "IP-Adapter", "an IP-Adapter pack's node before Model from ComfyUI").with_ip_adapter(
            file, encoder, blocks
        )
        return io.NodeOutput(model.with_backbone(changed, changed.ip_adapter.modules()))


class ModelFromComfy(io.ComfyNode):
    """A MODEL, VAE and CLIP of ComfyUI's own loaders, made coherent over time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        import comfy.samplers

        samplers, schedulers = comfy.samplers.KSampler.SAMPLERS, comfy.samplers.KSampler.SCHEDULERS
        return schema(
            ["model adapter", "wan", "ltxv", "sdxl", "sd15", "unet"],
            node_id="VeoStyleModelFromComfy",
            display_name="Model from ComfyUI (VeoStyle)",
            description="SD 1.5, SDXL, Wan or LTXV from ComfyUI's loaders, with the LoRA and patches on it.",
            inputs=[
                io.Model.Input("model", tooltip="SD 1.5, SDXL, Wan 2.1, Wan 2.2 or LTXV; LoRA loaders go before this."),
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model."),
                io.Clip.Input("clip", tooltip="Reads the style's words; without words, the empty prompt."),
                io.Combo.Input("sampler_name", options=samplers, default="dpmpp_2m", tooltip="As in KSampler."),
                io.Combo.Input("scheduler", options=schedulers, default="karras", tooltip="As in KSampler."),
            ],
            outputs=[VeoModel.Output(display_name="model", tooltip="For the denoiser and the decoder.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, model, vae, clip, sampler_name, scheduler) -> io.NodeOutput:
        from .comfy_backbone import ComfyBackbone

        identity = ancestry(cls.hidden.prompt or {}, str(cls.hidden.unique_id))
        backbone = ComfyBackbone(model, vae, clip, sampler_name, scheduler, identity)
        return io.NodeOutput(loaded(backbone))


def missing(**paths: str | None) -> bool | str:
    """True, or which of these paths is not there; empty ones, and those that another node gives, are not looked at."""
    gone = [
        f"{name} = {path} does not exist; give another path"
        for name, path in paths.items()
        if path and not Path(path).exists()
    ]
    return "; ".join(gone) or True


def weight_files(kind: str) -> list[str]:
    """Names of the safetensors files in ComfyUI's folders of a kind."""
    return [n for n in folder_paths.get_filename_list(kind) if n.endswith((".safetensors", ".sft"))]


def unlisted(kind: str, field: str, name: str | None) -> bool | str:
    """True, or where the file that an input names belongs; None, of another node, is not looked at."""
    if name is None or (name not in ("", NONE) and folder_paths.get_full_path(kind, name)):
        return True
    folder = (folder_paths.get_folder_paths(kind) or ["?"])[0]
    if name in ("", NONE):
        return f"{field} = none: choose a file of ComfyUI's {kind} folder ({folder}; press R after putting one there)"
    return (
        f"{field} = {name} is not in ComfyUI's {kind} folder ({folder}); put it there and press R in the editor, or choose "
        "another"
    )


def first_of(problems: list[bool | str]) -> bool | str:
    """True, or what is wrong with the first input at fault."""
    return next((p for p in problems if p is not True), True)


def chosen(kind: str, name: str | None, path: str | None = "") -> str | None:
    """The file that a path or a name in ComfyUI's folders means; None where another node gives it."""
    return path or (folder_paths.get_full_path(kind, name) if name and path is not None else None)


def states(*paths: str | None) -> str:
    """Changes when one of these files does."""
    from ..veo_core.weights_file import file_state

    return " ".join(file_state(Path(path)) for path in paths if path)


def ancestry(prompt: dict, node_id: str) -> str:
    """A hash of a node and all that it comes from in the queued graph: the same in another session.

    Files are known by their names: another file under the same name is not told apart.
    """
    known: dict[str, str] = {}

    def described(node: str) -> str:
        if node not in known:
            known[node] = node  # holds if a broken graph leads back here
            entry = prompt[node]
            inputs = {name: linked(value) for name, value in entry["inputs"].items()}
            text = json.dumps([entry["class_type"], inputs], sort_keys=True, default=str)
            known[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return known[node]

    def linked(value: object) -> object:
        link = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[0] in prompt
        return [described(value[0]), value[1]] if link else value

    return described(node_id) if node_id in prompt else node_id


def adaptable(model: LoadedModel, what: str, instead: str) -> StableDiffusionBackbone:
    """The checkpoint in a VEO_MODEL. Raises ModelError where it holds a model that takes no adapters."""
    from ..veo_core.errors import ModelError

    backbone = model.engine.backbone
    if not hasattr(backbone, "with_lora"):
        raise ModelError(
            f"model is {backbone.name}, which takes no {what} here; give a checkpoint of Load Model (VeoStyle), or use {instead}"
        )
    return backbone


def loaded(backbone: Backbone) -> LoadedModel:
    """An engine around a backbone, its networks under ComfyUI's memory management where core does not move them itself."""
    import torch

    from ..veo_core.engine import Stylizer
    from ..veo_core.motion.flow import load_flow

    engine = Stylizer(backbone, load_flow(torch.device("cpu")))
    modules = [engine.flow] if backbone.managed else [backbone.module, engine.flow]
    return LoadedModel(engine, [patcher_of(m) for m in modules])
