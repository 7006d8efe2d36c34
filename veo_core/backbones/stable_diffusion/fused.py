"""diffusers' norms through the fused kernels: group norm, SiLU, and what stands around them in a residual block."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.st_norm import affine_act, channel_moments, group_affine, group_norm
from ...layers.style_session import NormSite


class FusedGroupNorm(nn.GroupNorm):
    """A group norm of diffusers, its weights shared, with what follows it in the same two passes.

    Attributes:
        silu: whether SiLU follows.
        site: asked for a further scale and shift of the norm's output while it is active.
    """

    def __init__(self, norm: nn.GroupNorm, silu: bool = False):
        super().__init__(norm.num_groups, norm.num_channels, norm.eps, device="meta")
        self.weight, self.bias, self.silu = norm.weight, norm.bias, silu
        self.site: NormSite | None = None

    def forward(self, h: Tensor, added: Tensor | None = None) -> Tensor:
        """``h [n, C, ...]``; ``added [n, C]`` is added to every pixel before."""
        if h.dim() != 4:
            return self.forward(h.flatten(2)[..., None], added).view(h.shape)
        if self.site is not None and self.site.active:
            return self._calibrated(h if added is None else h + added[..., None, None])
        return group_norm(h, self.num_groups, self.weight, self.bias, self.eps, self.silu, added)

    def _calibrated(self, h: Tensor) -> Tensor:
        moments = channel_moments(h)
        scale, shift = group_affine(moments, self.num_groups, self.weight, self.bias, self.eps)
        mean, square = moments.unbind(1)
        # The moments of the norm's output follow from those of its input.
        output = scale * mean + shift
        variance = scale**2 * (square - mean**2).clamp(min=0)
        further = self.site.calibration(torch.stack([output, variance + output**2], 1))
        if further is not None:
            scale, shift = scale * further[0], shift * further[0] + further[1]
        return affine_act(h, scale, shift, self.silu)


def fuse(model: nn.Module) -> None:
    """Puts fused norms into a UNet or an autoencoder of diffusers, and its weights into channels-last.

    The names of modules and weights stay as they are.
    """
    from diffusers.models.resnet import ResnetBlock2D

    activations = (nn.SiLU, nn.Identity)
    for module in list(model.modules()):
        if isinstance(module, ResnetBlock2D) and _is_plain(module):
            module.norm1, module.norm2 = (FusedGroupNorm(n, silu=True) for n in (module.norm1, module.norm2))
            module.__class__ = _fused_block()
        elif type(getattr(module, "conv_norm_out", None)) is nn.GroupNorm and isinstance(module.conv_act, activations):
            module.conv_norm_out = FusedGroupNorm(module.conv_norm_out, silu=True)
            module.conv_act = nn.Identity()
        for name, child in list(module.named_children()):
            if type(child) is nn.GroupNorm and child.affine:
                setattr(module, name, FusedGroupNorm(child))
    model.to(memory_format=torch.channels_last)


def _is_plain(block: nn.Module) -> bool:
    scaled = block.time_embedding_norm != "default" or block.upsample is not None or block.downsample is not None
    return not scaled and isinstance(block.nonlinearity, nn.SiLU) and type(block.norm1) is nn.GroupNorm


@functools.cache
def _fused_block() -> type[nn.Module]:
    """diffusers is imported when it is first needed."""
    from diffusers.models.resnet import ResnetBlock2D

    class FusedResnetBlock2D(ResnetBlock2D):
        """diffusers' block without dropout, the time embedding added within the second norm."""

        def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
            h = self.conv1(self.norm1(input_tensor))
            added = None
            if self.time_emb_proj is not None:
                added = self.time_emb_proj(temb if self.skip_time_act else F.silu(temb))
            h = self.conv2(self.norm2(h, added))
            skip = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
            return skip + h if self.output_scale_factor == 1 else (skip + h) / self.output_scale_factor

    return FusedResnetBlock2D
