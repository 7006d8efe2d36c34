"""Nodes for ComfyUI, one file a stage. They read inputs, call one function of the engine, and return."""

import importlib
import importlib.util
import logging

from comfy_api.latest import ComfyExtension, io

log = logging.getLogger(__name__)

NODES = {
    "video": ("LoadVideo", "ClipFromVideo", "ClipFromImages", "Scenes"),
    "style": ("Encoder", "Blend"),
    "model": ("LoadModel", "ModelFromComfy", "LoRAInjector", "IPAdapterLoader"),
    "memory": ("MemoryPool", "MemoryReport"),
    "denoise": ("STNormDenoiser",),
    "decode": ("VAEDecode",),
    "output": ("Frames", "Compare", "SaveVideo"),
}
# Packages by the name that they are imported under: the name that pip knows, and the nodes that cannot do without.
NEEDS = {
    "av": ("av", {*NODES["video"], *NODES["memory"], *NODES["denoise"], *NODES["decode"], *NODES["output"]}),
    "diffusers": ("diffusers", {"LoRAInjector", "IPAdapterLoader"}),
    "transformers": ("transformers", {"LoRAInjector", "IPAdapterLoader"}),
    "open_clip": ("open_clip_torch", {"IPAdapterLoader"}),
}


def available_nodes() -> list[type[io.ComfyNode]]:
    """Every node whose packages are there; the log says which are left out and what they miss."""
    absent = [needed for package, needed in NEEDS.items() if importlib.util.find_spec(package) is None]
    found = []
    for file, names in NODES.items():
        module = importlib.import_module(f".{file}", __package__)
        for name in names:
            missing = [pip for pip, nodes in absent if name in nodes]
            if missing:
                log.warning("VeoStyle: %s is left out; install %s", name, ", ".join(missing))
            else:
                found.append(getattr(module, name))
    return found


class VeoStyleExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # The oldest core calls no on_load.
        from .routes import register

        register()
        return available_nodes()
