"""Stand-ins for core's loaders, by the same inputs and outputs, that give tiny models: for queueing shipped workflows."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))


def _made(family):
    with torch.inference_mode(False):
        import comfy_tiny

        return getattr(comfy_tiny, family)()


def _loader(inputs, outputs, make):
    """A node class whose inputs are free text and whose outputs come from ``make(inputs)``."""

    class Loader:
        RETURN_TYPES, FUNCTION, CATEGORY = outputs, "load", "test"

        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            return {"required": {name: ("STRING", {"default": ""}) for name in inputs}}

        def load(self, **values):
            return make(values)

    return Loader


def _checkpoint(values):
    model, vae, clip = _made("sdxl" if "xl" in values["ckpt_name"] else "sd15")
    return model, clip, vae


NODE_CLASS_MAPPINGS = {
    "TinyCheckpointLoaderSimple": _loader(("ckpt_name",), ("MODEL", "CLIP", "VAE"), _checkpoint),
    "TinyUNETLoader": _loader(("unet_name", "weight_dtype"), ("MODEL",), lambda v: _made("wan")[:1]),
    "TinyVAELoader": _loader(("vae_name",), ("VAE",), lambda v: _made("wan")[1:2]),
    "TinyCLIPLoader": _loader(("clip_name", "type", "device"), ("CLIP",), lambda v: _made("wan")[2:]),
}
