"""VeoStyle: video style transfer for ComfyUI. The root of the repository is the package itself."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """What ComfyUI calls for the pack's nodes; nothing heavy is imported before."""
    from .nodes import VeoStyleExtension

    return VeoStyleExtension()
