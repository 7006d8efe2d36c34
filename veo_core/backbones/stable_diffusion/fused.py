"""diffusers' norms through the fused kernels: group norm, SiLU, and what stands around them in a residual block."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.st_norm import affine_act, channel_moments, group_affine, group_norm

Calibration = Callable[[Tensor], tuple[Tensor, Tensor] | None]


class FusedGroupNorm(nn.GroupNorm):
    """A group norm of diffusers, its weights shared, with what follows it in the same two passes.

    Attributes:
        silu: whether SiLU follows.
        calibration: given the moments ``[n, 2, C]`` of the norm's output, a further scale and shift ``[n, C]``, or None.
    """

    def __init__(self, norm: nn.GroupNorm, silu: bool = False):
        super().__init__(norm.num_groups, norm.num_channels, norm.eps, device="meta")
        self.weight, self.bias, self.silu = norm.weight, norm.bias, silu
        self.calibration: Calibration | None = None

    def forward(self, h: Tensor, added: Tensor | None = None) -> Tensor:
        """``h [n, C, ...]``; ``added [n, C]`` is added to every pixel before."""
        if h.dim() != 4:
            return self.forward(h.flatten(2)[..., None], added).view(h.shape)
        if self.calibration is not None:
            return self._calibrated(h if added is None else h + added[..., None, None])
        return group_norm(h, self.num_groups, self.weight, self.bias, self.eps, self.silu, added)

    def _calibrated(self, h: Tensor) -> Tensor:
        moments = channel_moments(h)
        scale, shift = group_affine(moments, self.num_groups, self.weight, self.bias, self.eps)
        mean, square = moments.unbind(1)
        # The moments of the norm's output follow from those of its input.
        output = torch.stack([scale * mean + shift, scale**2 * square + 2 * scale * shift * mean + shift**2], 1)
        further = self.calibration(output)
        if further is not None:
            scale, shift = scale * further[0], shift * further[0] + further[1]
        return affine_act(h, scale, shift, self.silu)


def fuse(model: nn.Module) -> None:
    """Puts fused norms into a UNet or an autoencoder of diffusers, and its weights into channels-last.

    The names of modules and weights stay as they are.
    """
    from diffusers.models.resnet import ResnetBlock2D

    for module in list(model.modules()):
        if isinstance(module, ResnetBlock2D) and _is_plain(module):
            module.norm1, module.norm2 = (FusedGroupNorm(n, silu=True) for n in (module.norm1, module.norm2))
            module.forward = MethodType(_residual, module)
        elif isinstance(getattr(module, "conv_norm_out", None), nn.GroupNorm):
            module.conv_norm_out = FusedGroupNorm(module.conv_norm_out, silu=True)
            module.conv_act = nn.Identity()
        for name, child in list(module.named_children()):
            if type(child) is nn.GroupNorm:
                setattr(module, name, FusedGroupNorm(child))
    model.to(memory_format=torch.channels_last)


def _is_plain(block: nn.Module) -> bool:
    scaled = block.time_embedding_norm != "default" or block.upsample is not None or block.downsample is not None
    return not scaled and isinstance(block.nonlinearity, nn.SiLU) and type(block.norm1) is nn.GroupNorm


def _residual(block: nn.Module, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
    """diffusers' ResnetBlock2D without dropout, the time embedding added within the second norm."""
    h = block.conv1(block.norm1(input_tensor))
    projection = block.time_emb_proj
    added = None
    if projection is not None:
        added = projection(temb if block.skip_time_act else F.silu(temb))
    h = block.conv2(block.norm2(h, added))
    x = input_tensor if block.conv_shortcut is None else block.conv_shortcut(input_tensor)
    return (x + h) if block.output_scale_factor == 1 else (x + h) / block.output_scale_factor
