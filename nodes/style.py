"""Style encoder and blend."""

from __future__ import annotations

from comfy_api.latest import io

from .types import CATEGORY, VeoStyle


class Encoder(io.ComfyNode):
    """Pictures and words to a style that any model of the pack can read."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleEncoder",
            display_name="Style Encoder (VeoStyle)",
            category=CATEGORY,
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
                    "Lines may begin with @scene 2, @48 (a frame) or @2.5s. (words:1.3) weigh more.",
                ),
                io.String.Input(
                    "negative", default="", multiline=True, optional=True, tooltip="What is not wanted, in words."
                ),
            ],
            outputs=[VeoStyle.Output(display_name="style")],
        )

    @classmethod
    def execute(cls, weight, images=None, text="", negative="") -> io.NodeOutput:
        from ..veo_core.style.encoder import style_from_tensors
        from ..veo_core.style.prompts import parse_prompts

        pictures = [] if images is None else list(images.movedim(-1, 1))
        return io.NodeOutput(style_from_tensors(pictures, weight=weight, prompts=parse_prompts(text, negative)))


class Blend(io.ComfyNode):
    """Two styles as one; blend again for more."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleBlend",
            display_name="Style Blend (VeoStyle)",
            category=CATEGORY,
            description="Two styles as one, pictures and words.",
            inputs=[
                VeoStyle.Input("style_a"),
                VeoStyle.Input("style_b"),
                io.Float.Input(
                    "share_b", default=0.5, min=0.0, max=1.0, step=0.01, tooltip="Share of style_b; 0 is style_a alone."
                ),
            ],
            outputs=[VeoStyle.Output(display_name="style")],
        )

    @classmethod
    def execute(cls, style_a, style_b, share_b) -> io.NodeOutput:
        from ..veo_core.style.encoder import blend_styles

        return io.NodeOutput(blend_styles([style_a, style_b], [1 - share_b, share_b]))
