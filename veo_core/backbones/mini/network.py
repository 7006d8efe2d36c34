"""All networks of veo-mini in one module, as they are trained and saved together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.st_norm import TemporalContext
from ...motion.flow import FlowNet
from .autoencoder import Autoencoder
from .style_path import PICTURE_SIZE, MappingNetwork, StyleAdapter, StylePredictor, moments_code
from .unet import UNet


class MiniNetwork(nn.Module):
    """Autoencoder, style path, denoiser and optical flow."""

    def __init__(self):
        super().__init__()
        self.autoencoder = Autoencoder()
        self.predictor = StylePredictor()
        self.mapping = MappingNetwork()
        self.adapter = StyleAdapter()
        self.unet = UNet()
        self.flow = FlowNet()

    def style_code(self, pictures: Tensor) -> Tensor:
        """``pictures [n, 3, H, W]`` in 0..1 -> style codes ``[n, 173]``; codes may be mixed linearly."""
        pictures = F.interpolate(pictures, (PICTURE_SIZE, PICTURE_SIZE), mode="bilinear", antialias=True)
        moments = moments_code(pictures, self.autoencoder.encode(pictures))
        return torch.cat([self.predictor(pictures).float(), moments], dim=1)

    def predict(
        self, x: Tensor, content: Tensor, motion: Tensor, style: Tensor, sigma: Tensor, context: TemporalContext
    ) -> Tensor:
        """The clean stylised latents from a point on the bridge.

        Args:
            x, content: ``[(b t), 32, h, w]``. motion: ``[(b t), 3, h, w]``.
            style: style vectors ``[b, 256]``, of ``mapping`` or ``mapping.null``.
            sigma: place on the bridge ``[b]``: 1 at the content, 0 at the result.
        """
        condition, tokens = (v.to(self.unet.head.weight.dtype) for v in self.adapter(style, sigma))
        return self.unet(x, content, motion, condition, tokens, context)
