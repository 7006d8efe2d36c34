"""veo-mini as a backbone: the bundled model, from the source's own latents along a bridge to the stylised ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...errors import ModelError
from ...sampling.guidance import guide
from ...sampling.schedule import FlowSchedule
from ...style.encoder import Style
from ..base import Defaults, Sites
from .autoencoder import FACTOR, LATENT_CHANNELS
from .network import MiniNetwork
from .style_path import PICTURE_SIZE

BUNDLED = Path(__file__).parents[2] / "weights" / "veo-mini.safetensors"
_SIGNATURE = ("unet.motion.temporal.weight", "autoencoder.latent_mean", "flow.stem.0.0.weight")


def detect(path: Path) -> bool:
    """Whether a safetensors file holds veo-mini, told by its keys alone; nothing is loaded. No false negatives."""
    try:
        with safe_open(path, "pt") as file:
            return set(_SIGNATURE) <= set(file.keys())
    except (OSError, SafetensorError):
        return False


@dataclass(frozen=True)
class MiniCondition:
    """A style read by veo-mini: style vector ``[1, 256]``, guidance scale, and share of the way to the stylised end."""

    style: Tensor
    guidance: float
    strength: float


class MiniBackbone:
    """Implements :class:`~..base.Backbone`.

    The path starts at the content's latents, not at noise (a bridge in the sense of I2SB, Liu et al. 2023), so the seed
    has no effect. ``strength`` is the share of the way from the source (0) to the stylised picture (1).
    """

    name = "veo-mini"
    channels = LATENT_CHANNELS
    factor = FACTOR
    multiple = FACTOR
    defaults = Defaults(steps=1, guidance=1.0, window=12, overlap=4)

    def __init__(self, net: MiniNetwork, digest: str):
        # The flow serves every backbone and is loaded for itself.
        net.flow = None
        self.net = self.module = net.eval().requires_grad_(False)
        self.digest = digest
        self.weight_bytes = sum(v.nbytes for v in net.state_dict().values())

    @property
    def device(self) -> torch.device:
        return self.net.mapping.null.device

    def encode(self, frames: Tensor) -> Tensor:
        return self.net.autoencoder.encode(frames)

    def decode(self, latents: Tensor) -> Tensor:
        return self.net.autoencoder.decode(latents)

    def condition(self, style: Style, guidance: float, strength: float) -> MiniCondition:
        codes = [
            self.net.style_code(_crops(p).to(self.device)).mean(0) * w
            for p, w in zip(style.pictures, style.weights, strict=True)
        ]
        vector = self.net.mapping(torch.stack(codes).sum(0, keepdim=True))
        return MiniCondition(torch.lerp(self.net.mapping.null[None], vector, style.weight), guidance, strength)

    def schedule(self, steps: int, strength: float) -> FlowSchedule:
        return FlowSchedule(steps)

    def start(self, content: Tensor, noise: Callable[[], Tensor], strength: float) -> Tensor:
        return content

    def predict(self, x: Tensor, sigma: float, condition: MiniCondition, sites: Sites) -> Tensor:
        at = torch.full((1,), sigma, device=x.device)
        clean = self.net.predict(x, sites.content, sites.motion, condition.style, at, sites.temporal)
        if condition.guidance != 1:
            temporal = replace(sites.temporal, scope=sites.temporal.scope + "plain.")
            plain = self.net.predict(x, sites.content, sites.motion, self.net.mapping.null[None], at, temporal)
            clean = guide(clean, plain, condition.guidance)
        return torch.lerp(sites.content, clean, condition.strength)


def _crops(picture: Tensor) -> Tensor:
    """Square views along a picture's long side, short side at 256: ``[1 or 3, 3, 256, 256]``."""
    scale = PICTURE_SIZE / min(picture.shape[1:])
    size = [max(PICTURE_SIZE, round(s * scale)) for s in picture.shape[1:]]
    picture = F.interpolate(picture[None], size, mode="bicubic", antialias=True).clamp(0, 1)
    room = max(size) - PICTURE_SIZE
    offsets = [0, room // 2, room] if room > PICTURE_SIZE // 8 else [room // 2]
    cut = (
        (lambda o: picture[..., o : o + PICTURE_SIZE, :])
        if size[0] > size[1]
        else (lambda o: picture[..., o : o + PICTURE_SIZE])
    )
    return torch.cat([cut(o) for o in offsets])[..., :PICTURE_SIZE, :PICTURE_SIZE]


def load(path: Path = BUNDLED, device: torch.device | str = "cpu") -> MiniBackbone:
    """Loads veo-mini from safetensors, in float32.

    Raises:
        ModelError: the file is missing, damaged, or holds another kind of model.
    """
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give a safetensors file, or leave the model out for the bundled one")
    if not detect(path):
        raise ModelError(f"{path} is not veo-mini: {_kind(path)}. Give veo-mini.safetensors as it came with the pack")
    try:
        state = load_file(path)
        net = MiniNetwork()
        net.load_state_dict({k: v.float() for k, v in state.items()})
    except (SafetensorError, RuntimeError) as e:
        raise ModelError(
            f"{path} is damaged or of another version ({str(e).splitlines()[0]}); download it again"
        ) from e
    if any(not v.isfinite().all() for v in net.state_dict().values()):
        raise ModelError(f"{path} holds values that are not finite; download it again")
    return MiniBackbone(net.to(device), _digest(path, path.stat().st_mtime_ns))


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if head[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        return "it is a pickle or zip archive, which is never loaded"
    try:
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
    except (OSError, SafetensorError) as e:
        return f"it is not a whole safetensors file ({e})"
    return f"its keys are those of another model ({', '.join(keys[:3])}, ...)"


@cache
def _digest(path: Path, modified: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
