"""Style encoder."""

from __future__ import annotations

from comfy_api.latest import io

from .types import CATEGORY, VeoStyle


class Encoder(io.ComfyNode):
    """Pictures to a style that any model of the pack can read."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VeoStyleEncoder",
            display_name="Style Encoder (VeoStyle)",
            category=CATEGORY,
            description="The style of one picture, or the blend of a batch of pictures.",
            inputs=[
                io.Image.Input("images", tooltip="Style picture, or a batch to blend in equal parts."),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=0.0,
                    max=2.0,
                    step=0.05,
                    tooltip="How strongly the style is applied; above 1 exaggerates.",
                ),
            ],
            outputs=[VeoStyle.Output(display_name="style")],
        )

    @classmethod
    def execute(cls, images, weight) -> io.NodeOutput:
        from ..veo_core.style.encoder import style_from_tensors

        return io.NodeOutput(style_from_tensors(list(images.movedim(-1, 1)), weight=weight))
