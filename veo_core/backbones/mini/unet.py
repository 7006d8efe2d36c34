"""Denoiser of veo-mini: a UNet over latents with ST-Norm in every block and cross-frame style attention below."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.cross_frame_attention import CrossFrameStyleAttention
from ...layers.st_norm import STNorm, TemporalContext
from ...motion.warp import warp
from .autoencoder import LATENT_CHANNELS, Conv3, Upsample


class MotionPath(nn.Module):
    """Content features along the motion: a spatial convolution, then a temporal one that follows the optical flow.

    A factorised (2+1)-D convolution (Tran et al. 2018) over the frame before, warped to this one, and this frame;
    where the flow has no match, the frame stands in for its predecessor.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.spatial = Conv3(LATENT_CHANNELS, channels)
        self.temporal = nn.Conv2d(2 * channels + 1, channels, 1)
        self.out = Conv3(channels, channels, silu=True)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, content: Tensor, motion: Tensor, frames: int) -> Tensor:
        """``content [(b t), 32, h, w]``, ``motion [(b t), 3, h, w]`` (flow to the frame before in latent pixels, and
        how far it is to be trusted, 0..1) -> ``[(b t), C, h, w]``. The motion of a clip's first frame is not read."""
        h = self.spatial(content)
        clips = h.unflatten(0, (-1, frames))
        before = torch.cat([clips[:, :1], clips[:, :-1]], dim=1).flatten(0, 1)
        trust = motion[:, 2:].to(h.dtype)
        before = torch.lerp(h, warp(before, motion[:, :2]), trust)
        return self.out(self.temporal(torch.cat([h, before, trust], dim=1)))


class StyleBlock(nn.Module):
    """Residual block whose normalisations are ST-Norm."""

    def __init__(self, cin: int, cout: int, condition_dim: int, keys: itertools.count):
        super().__init__()
        self.norm1 = STNorm(cin, condition_dim, f"st_norm.{next(keys)}")
        self.conv1 = Conv3(cin, cout)
        self.norm2 = STNorm(cout, condition_dim, f"st_norm.{next(keys)}")
        self.conv2 = Conv3(cout, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, h: Tensor, condition: Tensor, context: TemporalContext) -> Tensor:
        y = self.conv1(self.norm1(h, condition, context, silu=True))
        return self.skip(h) + self.conv2(self.norm2(y, condition, context, silu=True))


class UNet(nn.Module):
    """Predicts the stylised latent from a point on the bridge between content and result.

    Args:
        widths: channels at 1, 1/2 and 1/4 of the latent's size; attention below the first.
        width: of the condition vector and of the style tokens.
    """

    def __init__(self, widths: tuple[int, int, int] = (64, 128, 256), width: int = 256):
        super().__init__()
        keys = itertools.count()
        a, b, c = widths

        def block(cin: int, cout: int) -> StyleBlock:
            return StyleBlock(cin, cout, width, keys)

        self.stem = Conv3(2 * LATENT_CHANNELS, a)
        self.motion = MotionPath(a)
        self.in1 = nn.ModuleList([block(a, a), block(a, a)])
        self.down1 = Conv3(a, b, stride=2)
        self.in2 = nn.ModuleList([block(b, b), block(b, b)])
        self.attend_in2 = CrossFrameStyleAttention(b, width)
        self.down2 = Conv3(b, c, stride=2)
        self.middle = nn.ModuleList([block(c, c) for _ in range(4)])
        self.attend_middle = nn.ModuleList([CrossFrameStyleAttention(c, width) for _ in range(2)])
        self.up2 = Upsample(c, b)
        self.out2 = nn.ModuleList([block(2 * b, b), block(b, b)])
        self.attend_out2 = CrossFrameStyleAttention(b, width)
        self.up1 = Upsample(b, a)
        self.out1 = nn.ModuleList([block(2 * a, a), block(a, a)])
        self.head = Conv3(a, LATENT_CHANNELS, silu=True)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, x: Tensor, content: Tensor, motion: Tensor, condition: Tensor, tokens: Tensor, context: TemporalContext
    ) -> Tensor:
        """Predicts the clean stylised latents.

        Args:
            x: latents on the bridge ``[(b t), 32, h, w]``, any h and w.
            content: latents of the source frames, same shape.
            motion: ``[(b t), 3, h, w]`` as of :class:`MotionPath`.
            condition: ``[b, 256]``. tokens: ``[b, m, 256]``.
            context: the frames' layout; see :class:`TemporalContext`.

        Returns:
            ``[(b t), 32, h, w]``.
        """
        height, width = x.shape[-2:]
        given, dtype = content, self.stem.weight.dtype
        # Whole halvings, and two positions at the coarsest for borders to be reflected in.
        pad = (0, max(8, width + -width % 4) - width, 0, max(8, height + -height % 4) - height)
        x, content = (F.pad(z, pad, mode="replicate").to(dtype) for z in (x, content))
        motion = F.pad(motion, pad, mode="replicate")
        t = context.frames
        h = self.stem(torch.cat([x, content], dim=1)) + self.motion(content, motion, t)
        for block in self.in1:
            h = block(h, condition, context)
        skip1 = h
        h = self.down1(h)
        for block in self.in2:
            h = block(h, condition, context)
        skip2 = h = self.attend_in2(h, tokens, t)
        h = self.down2(h)
        for i, block in enumerate(self.middle):
            h = block(h, condition, context)
            if i % 2 == 0:
                h = self.attend_middle[i // 2](h, tokens, t)
        h = torch.cat([self.up2(h), skip2], dim=1)
        h = self.out2[1](self.attend_out2(self.out2[0](h, condition, context), tokens, t), condition, context)
        h = torch.cat([self.up1(h), skip1], dim=1)
        for block in self.out1:
            h = block(h, condition, context)
        return given + self.head(h)[..., :height, :width].to(given.dtype)
