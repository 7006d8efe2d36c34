"""A small double of the parts of ComfyUI that the nodes touch, for tests without one."""

from __future__ import annotations

import mimetypes
import sys
import types
from enum import Enum
from pathlib import Path

import torch


class _Port:
    def __init__(self, kind: str, side: str, id: str = "", **settings):
        self.kind, self.side, self.id, self.settings = kind, side, id, settings
        self.optional = settings.get("optional", False)


def _type(name: str):
    def port(side):
        return lambda id="", **settings: _Port(name, side, id, **settings)

    return types.SimpleNamespace(Input=port("in"), Output=port("out"), io_type=name)


class Schema:
    """Keeps what it is given; only keywords that the oldest supported core knows are taken."""

    def __init__(
        self,
        node_id,
        display_name=None,
        category="sd",
        inputs=None,
        outputs=None,
        hidden=None,
        description="",
        is_output_node=False,
    ):
        self.node_id, self.display_name, self.category = node_id, display_name, category
        self.inputs, self.outputs, self.hidden = inputs or [], outputs or [], hidden or []
        self.description, self.is_output_node = description, is_output_node


class ComfyNode:
    hidden = types.SimpleNamespace(unique_id="1", prompt={"1": {}}, extra_pnginfo={"workflow": {"nodes": []}})


class NodeOutput:
    def __init__(self, *args, ui=None):
        self.args, self.ui = args, ui


class VideoFromFile:
    """A file, or one in memory; the newer core's trim window where ``trim`` is given."""

    def __init__(self, path, trim=None):
        self.path = path
        if trim:
            self.get_active_trim_window = lambda: trim

    def get_stream_source(self):
        return self.path


class VideoFromComponents:
    def __init__(self, images, audio, frame_rate):
        self.parts = types.SimpleNamespace(images=images, audio=audio, frame_rate=frame_rate)

    def get_components(self):
        return self.parts


class Interrupted(BaseException):
    """The new core's InterruptProcessingException is a BaseException too."""


def _save_place(folder: Path, prefix: str):
    """Core's: folder, name, a number that is free, subfolder, prefix."""
    place = folder / Path(prefix).parent
    place.mkdir(parents=True, exist_ok=True)
    name = Path(prefix).name
    return str(place), name, len(list(place.glob(f"{name}_*"))) + 1, str(Path(prefix).parent), prefix


def install(monkeypatch, root: Path) -> types.SimpleNamespace:
    """Puts the double's modules into ``sys.modules``; folders are made under ``root``."""
    state = types.SimpleNamespace(interrupted=False, updates=[], loaded=[], texts=[], routes={}, served=[], root=root)
    folders = {name: root / name for name in ("input", "output", "temp")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)

    def module(name, **members):
        made = types.ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def kind(file, wanted):
        return (mimetypes.guess_type(file)[0] or "").split("/")[0] in wanted

    io = types.SimpleNamespace(
        Schema=Schema,
        ComfyNode=ComfyNode,
        NodeOutput=NodeOutput,
        Custom=_type,
        Hidden=Enum("Hidden", {"unique_id": "UNIQUE_ID", "prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}),
        HiddenHolder=types.SimpleNamespace,
        FolderType=Enum("FolderType", {"output": "output", "temp": "temp"}),
        UploadType=Enum("UploadType", {"video": "video_upload", "image": "image_upload"}),
        **{
            n: _type(n.upper())
            for n in (
                "Image",
                "Audio",
                "Video",
                "Latent",
                "Int",
                "Float",
                "String",
                "Combo",
                "Boolean",
                "Model",
                "Vae",
                "Clip",
            )
        },
    )
    module("comfy_api")
    ui = types.SimpleNamespace(
        SavedResult=lambda filename, subfolder, type: {
            "filename": filename,
            "subfolder": subfolder,
            "type": type.value,
        },
        PreviewImage=lambda image: {"images": tuple(image.shape)},
        PreviewVideo=lambda values: {"images": values, "animated": (True,)},
    )
    module("comfy_api.latest", io=io, ui=ui, ComfyExtension=type("ComfyExtension", (), {}))
    module("comfy_api.input_impl", VideoFromFile=VideoFromFile, VideoFromComponents=VideoFromComponents)
    module(
        "folder_paths",
        get_input_directory=lambda: str(folders["input"]),
        get_output_directory=lambda: str(folders["output"]),
        get_temp_directory=lambda: str(folders["temp"]),
        get_annotated_filepath=lambda f: str(folders["input"] / f),
        exists_annotated_filepath=lambda f: (folders["input"] / f).is_file(),
        get_filename_list=lambda kind: sorted(
            p.name for p in (root / "models" / kind).glob("*") if (root / "models" / kind).is_dir()
        ),
        get_full_path=lambda kind, name: next((str(p) for p in [root / "models" / kind / name] if p.is_file()), None),
        get_folder_paths=lambda kind: [str(root / "models" / kind)],
        add_model_folder_path=lambda kind, path: None,
        models_dir=str(root / "models"),
        get_save_image_path=lambda prefix, folder, width, height: _save_place(Path(folder), prefix),
        get_full_path_or_raise=lambda kind, name: str(root / "models" / kind / name),
        filter_files_content_types=lambda files, wanted: [f for f in files if kind(f, wanted)],
    )

    routes = types.SimpleNamespace(post=lambda path: lambda handler: state.routes.setdefault(path, handler))
    app = types.SimpleNamespace(add_routes=state.served.extend)
    server = types.SimpleNamespace(
        app=app, routes=routes, send_progress_text=lambda text, node: state.texts.append(text)
    )
    module("server", PromptServer=types.SimpleNamespace(instance=server))

    def check():
        if state.interrupted:
            raise Interrupted

    class ModelPatcher:
        def __init__(self, model, load_device, offload_device):
            self.model, self.load_device, self.offload_device = model, load_device, offload_device

    class ProgressBar:
        def __init__(self, total, node_id=None):
            self.total = total

        def update_absolute(self, value, total=None, preview=None):
            state.updates.append((value, total, preview))

    management = module(
        "comfy.model_management",
        throw_exception_if_processing_interrupted=check,
        get_torch_device=lambda: torch.device("cpu"),
        unet_offload_device=lambda: "cpu",
        get_total_memory=lambda device: 8 << 30,
        load_models_gpu=lambda models, memory_required=0, force_full_load=False: state.loaded.append(
            (models, memory_required)
        ),
    )
    patcher = module("comfy.model_patcher", ModelPatcher=ModelPatcher)
    utils = module("comfy.utils", ProgressBar=ProgressBar)
    lists = types.SimpleNamespace(SAMPLERS=["euler", "dpmpp_2m", "uni_pc"], SCHEDULERS=["normal", "karras", "simple"])
    samplers = module("comfy.samplers", KSampler=lists)
    args = types.SimpleNamespace(disable_metadata=False)
    module("comfy.cli_args", args=args)
    module("comfy", model_management=management, model_patcher=patcher, utils=utils, samplers=samplers)
    return state
