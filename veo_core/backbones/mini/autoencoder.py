"""Autoencoder of veo-mini: pictures to latents at an eighth of their size and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.reflect import reflect_pad

FACTOR = 8
LATENT_CHANNELS = 32


class Conv3(nn.Conv2d):
    """3x3 convolution with reflected borders: zeros leave a dark line along the edge of the picture, repeats leave streaks.

    Args:
        silu: takes SiLU of its input. double: doubles its input bilinearly, which leaves no checkerboard.
    """

    def __init__(self, cin: int, cout: int, stride: int = 1, silu: bool = False, double: bool = False):
        super().__init__(cin, cout, 3, stride)
        self.silu, self.double = silu, double

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(reflect_pad(h, self.silu, self.double))


class ResidualBlock(nn.Module):
    """Two convolutions around a skip. No normalisation, so that a pixel depends on its neighbourhood alone."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = Conv3(channels, channels, silu=True)
        self.conv2 = Conv3(channels, channels, silu=True)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.conv2(self.conv1(h))


class Upsample(nn.Module):
    """Doubling, and a convolution."""

    def __init__(self, cin: int, cout: int):
        super().__init__()
        self.conv = Conv3(cin, cout, double=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(h)


class Autoencoder(nn.Module):
    """``encode`` gives latents normalised per channel, ``decode`` undoes it; both per frame and local in space.

    Results have the dtype of what is given, whatever the weights are computed in.
    """

    def __init__(self):
        super().__init__()
        # The identities keep the numbers under which weights are saved.
        self.encoder = nn.Sequential(
            Conv3(3, 32),
            nn.Identity(),
            Conv3(32, 64, stride=2, silu=True),
            ResidualBlock(64),
            Conv3(64, 128, stride=2),
            ResidualBlock(128),
            Conv3(128, 160, stride=2),
            ResidualBlock(160),
            ResidualBlock(160),
            nn.Identity(),
            Conv3(160, LATENT_CHANNELS, silu=True),
        )
        self.decoder = nn.Sequential(
            Conv3(LATENT_CHANNELS, 160),
            ResidualBlock(160),
            ResidualBlock(160),
            Upsample(160, 96),
            ResidualBlock(96),
            ResidualBlock(96),
            Upsample(96, 64),
            ResidualBlock(64),
            ResidualBlock(64),
            Upsample(64, 32),
            nn.Identity(),
            Conv3(32, 24, silu=True),
            nn.Identity(),
            Conv3(24, 3, silu=True),
        )
        self.register_buffer("latent_mean", torch.zeros(LATENT_CHANNELS, 1, 1))
        self.register_buffer("latent_std", torch.ones(LATENT_CHANNELS, 1, 1))

    def encode(self, frames: Tensor) -> Tensor:
        """``frames [n, 3, H, W]`` in 0..1, H and W multiples of 8 -> ``[n, 32, H / 8, W / 8]``, about unit variance."""
        z = self.encoder(_as(frames * 2 - 1, self.encoder[0].weight)).to(frames.dtype)
        return (z - self.latent_mean.to(z.dtype)) / self.latent_std.to(z.dtype)

    def decode(self, latents: Tensor) -> Tensor:
        """``latents [n, 32, h, w]`` -> frames ``[n, 3, 8 h, 8 w]``, nominally 0..1, not clamped."""
        z = latents * self.latent_std.to(latents.dtype) + self.latent_mean.to(latents.dtype)
        return self.decoder(_as(z, self.decoder[0].weight)).to(latents.dtype) / 2 + 0.5


def _as(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` in a weight's dtype, and in channels-last where the weight is."""
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    return x.to(weight.dtype, memory_format=torch.channels_last if last else torch.preserve_format)
