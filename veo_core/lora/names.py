"""Names that trainers give to a model's layers."""

from __future__ import annotations

import re

from torch import nn

_RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTER = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def ldm_unet_name(name: str, unet: nn.Module) -> str:
    """The name that a layer of diffusers' UNet has in single-file checkpoints (the original code's)."""
    if name in _OUTER:
        return _OUTER[name]
    layers = unet.config.layers_per_block
    if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", name):
        place = 1 if match[1] == "attentions" else 2 * int(match[2])
        return f"middle_block.{place}.{_inner(match[1], match[3])}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", name):
        down, block, layer = match[1] == "down", int(match[2]), int(match[4])
        place = block * (layers + 1) + layer + down
        side = "input" if down else "output"
        return f"{side}_blocks.{place}.{int(match[3] == 'attentions')}.{_inner(match[3], match[5])}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv", name):
        return f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.conv", name):
        block = unet.up_blocks[int(match[1])]
        after = 2 if getattr(block, "attentions", None) else 1
        return f"output_blocks.{int(match[1]) * (layers + 1) + layers}.{after}.conv"
    return name


def _inner(kind: str, rest: str) -> str:
    return _RESIDUAL.get(rest, rest) if kind == "resnets" else rest
