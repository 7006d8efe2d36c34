"""Cross-frame style attention: each frame looks at itself, the frame before, the scene's anchor and the style."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from ...kernels.cross_frame_attention import cross_frame_attention


def source_table(
    frames: int, device: torch.device | None = None, sources: tuple[str, ...] = ("self", "previous", "anchor")
) -> Tensor:
    """Which frames of a batch each frame reads.

    Args:
        frames: t, the anchor at index 0 included.
        sources: of ``self``, ``previous``, ``anchor``, ``next``.

    Returns:
        int64 ``[t, s]``. The anchor reads only itself, so that its features depend on nothing else in the batch.
    """
    this = torch.arange(frames, device=device)
    columns = {
        "self": this,
        "previous": (this - 1).clamp(min=0),
        "anchor": torch.zeros_like(this),
        "next": (this + 1).clamp(max=frames - 1),
    }
    table = torch.stack([columns[s] for s in sources], dim=1)
    table[0] = 0
    return table


class CrossFrameStyleAttention(nn.Module):
    """Residual block of cross-frame attention over the positions of a feature map; zero-initialised output.

    Args:
        channels: C, a multiple of ``head_dim``.
        token_dim: width of the style tokens.
    """

    def __init__(self, channels: int, token_dim: int, head_dim: int = 32):
        super().__init__()
        self.heads = channels // head_dim
        self.norm = nn.LayerNorm(channels)
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.style_kv = nn.Linear(token_dim, 2 * channels, bias=False)
        self.to_out = nn.Linear(channels, channels)
        nn.init.zeros_(self.to_out.weight)
        nn.init.zeros_(self.to_out.bias)

    def forward(self, h: Tensor, tokens: Tensor, frames: int) -> Tensor:
        """``h [(b t), C, H, W]``, ``tokens [b, m, D]`` -> the shape of ``h``."""
        x = self.norm(rearrange(h, "f c y x -> f (y x) c"))
        q, k, v = rearrange(self.to_qkv(x), "(b t) n (p h d) -> p b t h n d", t=frames, p=3, h=self.heads)
        style_k, style_v = rearrange(self.style_kv(tokens), "b m (p h d) -> p b h m d", p=2, h=self.heads)
        out = cross_frame_attention(q, k, v, source_table(frames, h.device), style_k, style_v)
        out = self.to_out(rearrange(out, "b t h n d -> (b t) n (h d)"))
        return h + rearrange(out, "f (y x) c -> f c y x", y=h.shape[-2])
