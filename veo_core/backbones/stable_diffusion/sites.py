"""Where a style session meets diffusers' UNet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ....kernels.cross_frame_attention import cross_frame_attention
from ...errors import ModelError
from ...layers.style_session import NormSite, Site, StyleSession, sites_of
from .fused import FusedGroupNorm


@contextmanager
def connected(unet: nn.Module, session: StyleSession) -> Iterator[None]:
    """In this block the UNet's self-attentions and up-path norms ask the session; afterwards nothing of it is left."""
    with ExitStack() as stack:
        attentions = dict(self_attentions(unet))
        for name, site in sites_of(list(attentions), "up_blocks.").items():
            stack.callback(setattr, attentions[name], "processor", attentions[name].processor)
            attentions[name].processor = _SessionProcessor(session, site)
        if session.injection.norm:
            norms = up_norms(unet)
            for index, (name, norm) in enumerate(norms):
                norm.site = NormSite(session, Site(name, index / max(1, len(norms) - 1)))
                stack.callback(setattr, norm, "site", None)
        yield


def self_attentions(unet: nn.Module) -> list[tuple[str, nn.Module]]:
    """Spatial self-attentions in order of their names; AnimateDiff's temporal ones stay its own."""
    return [(n, m) for n, m in unet.named_modules() if n.endswith(".attn1") and "motion_modules" not in n]


def up_norms(unet: nn.Module) -> list[tuple[str, nn.Module]]:
    """First group norm of each residual block of the up path, fused at loading."""
    found = ((n, m) for n, m in unet.named_modules() if n.startswith("up_blocks.") and ".resnets." in n)
    norms = [(n, m) for n, m in found if n.endswith(".norm1")]
    if strange := [n for n, m in norms if not isinstance(m, FusedGroupNorm)]:
        raise ModelError(
            f"{strange[0]} is no group norm of SD 1.5 or SDXL, so that ST-Norm has no place; give a plain model"
        )
    return norms


class _SessionProcessor:
    """diffusers' attention processor for a self-attention, its core handed to a session."""

    def __init__(self, session: StyleSession, site: Site):
        self.session, self.site = session, site

    def __call__(
        self, attn, hidden_states: Tensor, encoder_hidden_states=None, attention_mask=None, temb=None
    ) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return rearrange(x, "b n (h d) -> b h n d", h=attn.heads)

        q, k, v = (heads(f(hidden_states)) for f in (attn.to_q, attn.to_k, attn.to_v))
        out = self.session.attend(self.site, q, k, v, F.scaled_dot_product_attention, cross_frame_attention)
        return attn.to_out[0](rearrange(out, "b h n d -> b n (h d)"))
