"""Style path of veo-mini: a picture to a style code, and the mapping network and Style Adapter behind it."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .autoencoder import LATENT_CHANNELS

PICTURE_SIZE = 256
PREDICTOR_WIDTH = 100
CODE_WIDTH = PREDICTOR_WIDTH + 9 + 2 * LATENT_CHANNELS

_MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _SameConv(nn.Conv2d):
    """Convolution padded as TensorFlow's SAME: at stride 2, on the right and below only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel_size[0] == 3:
            x = F.pad(x, (0, 1, 0, 1) if self.stride[0] == 2 else (1, 1, 1, 1))
        return super().forward(x)


class _InvertedResidual(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, expand: int):
        super().__init__()
        hidden = cin * expand
        layers: list[nn.Module] = [] if expand == 1 else [_SameConv(cin, hidden, 1), nn.ReLU6()]
        layers += [_SameConv(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(), _SameConv(hidden, cout, 1)]
        self.body = nn.Sequential(*layers)
        self.skip = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class StylePredictor(nn.Module):
    """MobileNetV2 (Sandler et al. 2018, batch norm folded) that reads a 100-vector of style off a picture.

    The architecture and weights are the style prediction network of Magenta's arbitrary image stylization
    (Ghiasi et al. 2017; Apache-2.0), kept frozen: it has seen some 80,000 paintings, this project has not.
    """

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = [_SameConv(3, 32, 3, 2), nn.ReLU6()]
        cin = 32
        for expand, cout, count, stride in _MOBILENET_V2:
            for i in range(count):
                layers.append(_InvertedResidual(cin, cout, stride if i == 0 else 1, expand))
                cin = cout
        layers += [_SameConv(cin, 1280, 1), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(1280, PREDICTOR_WIDTH)

    def forward(self, pictures: Tensor) -> Tensor:
        """``pictures [n, 3, 256, 256]`` in 0..1 -> ``[n, 100]``."""
        return self.head(self.features(pictures).mean((-2, -1)))


def moments_code(pictures: Tensor, latents: Tensor) -> Tensor:
    """Colour and latent statistics, which the predictor's 100-vector carries only roughly.

    Args:
        pictures: ``[n, 3, H, W]`` in 0..1.
        latents: ``[n, 32, h, w]``, the same pictures encoded.

    Returns:
        ``[n, 73]``: RGB means, upper triangle of the RGB covariance's matrix root by columns, latent means and
        standard deviations.
    """
    rgb = rearrange(pictures.float(), "n c h w -> n c (h w)")
    mean = rgb.mean(-1)
    centred = rgb - mean[..., None]
    covariance = centred @ centred.mT / rgb.shape[-1]
    rows, columns = torch.triu_indices(3, 3, device=rgb.device)
    z = latents.float()
    return torch.cat([mean * 2 - 1, covariance[:, rows, columns] * 10, z.mean((-2, -1)), z.std((-2, -1))], dim=1)


class MappingNetwork(nn.Module):
    """Multilayer perceptron from a style code to the style vector, in the manner of StyleGAN (Karras et al. 2019)."""

    def __init__(self, width: int = 256, depth: int = 3):
        super().__init__()
        self.register_buffer("code_mean", torch.zeros(CODE_WIDTH))
        self.register_buffer("code_std", torch.ones(CODE_WIDTH))
        widths = [CODE_WIDTH] + [width] * depth
        layers: list[nn.Module] = []
        for cin, cout in itertools.pairwise(widths):
            layers += [nn.Linear(cin, cout), nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.Linear(width, width))
        self.null = nn.Parameter(torch.zeros(width))

    def forward(self, code: Tensor) -> Tensor:
        """``code [n, 173]`` -> style vector ``[n, 256]``."""
        return self.body((code - self.code_mean) / self.code_std)


class StyleAdapter(nn.Module):
    """From the style vector and the time on the bridge to what modulates the denoiser.

    ``forward`` gives the condition vector of every ST-Norm and the style tokens of every attention.
    """

    def __init__(self, width: int = 256, tokens: int = 8):
        super().__init__()
        self.tokens = tokens
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.mix = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.to_tokens = nn.Linear(width, tokens * width)

    def forward(self, style: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """``style [b, 256]``, ``sigma [b]`` in 0..1 -> condition ``[b, 256]``, tokens ``[b, 8, 256]``."""
        frequencies = torch.exp(torch.linspace(0, 6, 32, device=sigma.device))
        phase = sigma.float()[:, None] * frequencies
        time = self.time(torch.cat([phase.sin(), phase.cos()], dim=1).to(style.dtype))
        return self.mix(style + time), rearrange(self.to_tokens(style), "b (m d) -> b m d", m=self.tokens)
