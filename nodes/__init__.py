"""Nodes for ComfyUI, one file a stage. They read inputs, call one function of the engine, and return."""

from comfy_api.latest import ComfyExtension, io

from .decode import VAEDecode
from .denoise import STNormDenoiser
from .model import IPAdapterLoader, LoadModel, LoRAInjector, ModelFromComfy
from .style import Blend, Encoder
from .video import ClipFromImages, ClipFromVideo, Frames, LoadVideo


class VeoStyleExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LoadVideo,
            ClipFromVideo,
            ClipFromImages,
            Encoder,
            Blend,
            LoadModel,
            ModelFromComfy,
            LoRAInjector,
            IPAdapterLoader,
            STNormDenoiser,
            VAEDecode,
            Frames,
        ]
