"""VeoStyle: video style transfer for ComfyUI. The root of the repository is the package itself."""

WEB_DIRECTORY = "web"


async def comfy_entrypoint():
    from .nodes import VeoStyleExtension

    return VeoStyleExtension()
