"""Style encoder and blend."""

from __future__ import annotations

from comfy_api.latest import io

from .files import example_path, painting_names
from .types import VeoStyle, schema, valid

NONE = "none"


class Encoder(io.ComfyNode):
    """Pictures and words to a style that any model of the pack can read."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["style image", "style prompt", "style reference", "text style"],
            node_id="VeoStyleEncoder",
            display_name="Style Encoder (VeoStyle)",
            description="A style: a picture, a batch of pictures to blend, words, or both.",
            inputs=[
                io.Image.Input("images", optional=True, tooltip="Style picture, or a batch to blend in equal parts."),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=0.0,
                    max=2.0,
                    step=0.05,
                    tooltip="How strongly the style is applied; above 1 exaggerates, for veo-mini and IP-Adapter.",
                ),
                io.String.Input(
                    "text",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="Style in words, for Stable Diffusion and other models that read them; veo-mini does not. "
                    "Lines may be for a scene, a frame or a time only, and words may weigh more; the node's help shows how.",
                ),
                io.String.Input(
                    "negative", default="", multiline=True, optional=True, tooltip="What is not wanted, in words."
                ),
                io.Combo.Input(
                    "painting",
                    options=[NONE, *painting_names()],
                    default=NONE,
                    optional=True,
                    tooltip="A painting that comes with the pack, blended with images in equal parts where both are given.",
                ),
            ],
            outputs=[VeoStyle.Output(display_name="style", tooltip="For the denoiser, or to blend.")],
        )

    @classmethod
    def validate_inputs(cls, text="", negative=""):
        from ..veo_core.style.prompts import parse_prompts

        return valid(parse_prompts, text, negative)

    @classmethod
    def execute(cls, weight, images=None, text="", negative="", painting=NONE) -> io.NodeOutput:
        from ..veo_core.style.encoder import load_style, style_from_tensors
        from ..veo_core.style.prompts import parse_prompts

        pictures = [] if images is None else list(images.movedim(-1, 1))
        if path := example_path(painting):
            pictures += load_style([path]).pictures
        return io.NodeOutput(style_from_tensors(pictures, weight=weight, prompts=parse_prompts(text, negative)))


class Blend(io.ComfyNode):
    """Two styles as one; blend again for more."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            ["mix styles", "combine styles", "style interpolation"],
            node_id="VeoStyleBlend",
            display_name="Style Blend (VeoStyle)",
            description="Two styles as one, pictures and words; the same shares throughout, or others in each scene.",
            inputs=[
                VeoStyle.Input("style_a", tooltip="The first style."),
                VeoStyle.Input("style_b", tooltip="The second style."),
                io.Float.Input(
                    "share_b", default=0.5, min=0.0, max=1.0, step=0.01, tooltip="Share of style_b; 0 is style_a alone."
                ),
                io.String.Input(
                    "scenes",
                    default="",
                    optional=True,
                    tooltip="Share of style_b in each scene in order, such as 0, 0.5, 1; later scenes take the last. In place "
                    "of share_b.",
                ),
            ],
            outputs=[VeoStyle.Output(display_name="style", tooltip="For the denoiser, or to blend again.")],
        )

    @classmethod
    def validate_inputs(cls, scenes=""):
        from ..veo_core.style.encoder import parse_shares

        return valid(parse_shares, scenes) if scenes and scenes.strip() else True

    @classmethod
    def execute(cls, style_a, style_b, share_b, scenes="") -> io.NodeOutput:
        from ..veo_core.style.encoder import blend_by_scene, parse_shares

        shares = parse_shares(scenes) if scenes.strip() else [share_b]
        return io.NodeOutput(blend_by_scene([style_a, style_b], [[1 - share, share] for share in shares]))
