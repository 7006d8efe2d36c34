"""veo-mini as a backbone: the bundled model, from the source's own latents along a bridge to the stylised ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...cuda_graphs import CudaGraphs
from ...errors import InputError, ModelError
from ...layers.st_norm import TemporalContext
from ...motion.fusion import MOTION_CHANNELS
from ...options import Defaults, StylizeOptions
from ...sampling.guidance import guide
from ...sampling.sampler import WindowJob
from ...sampling.schedule import FlowSchedule
from ...style.encoder import Style
from ...video.scenes import Survey
from ...weights_file import Header, describe, digest, read_header
from ..base import COMMON
from .autoencoder import FACTOR, LATENT_CHANNELS
from .network import MiniNetwork
from .style_path import PICTURE_SIZE

BUNDLED = Path(__file__).parents[2] / "weights" / "veo-mini.safetensors"
_SIGNATURE = ("unet.motion.temporal.weight", "autoencoder.latent_mean", "flow.stem.0.0.weight")


def detect(header: Header) -> bool:
    """Whether a safetensors file holds veo-mini, told by its keys alone; nothing is loaded. No false negatives."""
    return set(_SIGNATURE) <= set(header)


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
    time_factor = 1
    managed = False
    multiple = FACTOR
    defaults = Defaults(steps=1, guidance=1.0, window=12, overlap=4)
    reads = COMMON
    temporal = False
    captured = True

    def __init__(self, net: MiniNetwork, digest: str, dtype: torch.dtype = torch.float32):
        # The flow serves every backbone and is loaded for itself.
        net.flow = None
        self.net = self.module = net.eval().requires_grad_(False)
        # What reads a style runs once; what runs on every frame is in its dtype, in the order that convolutions are fast in.
        for part in (net.autoencoder, net.unet):
            part.to(dtype=dtype, memory_format=torch.channels_last)
        self.digest = digest
        self.weight_bytes = sum(v.nbytes for v in net.state_dict().values())

    @property
    def device(self) -> torch.device:
        return self.net.mapping.null.device

    def encode(self, frames: Tensor) -> Tensor:
        return self.net.autoencoder.encode(frames)

    def decode(self, latents: Tensor) -> Tensor:
        return self.net.autoencoder.decode(latents)

    def condition(self, style: Style, options: StylizeOptions, survey: Survey) -> MiniCondition:
        if not style.pictures:
            raise InputError(
                "style has no picture, and veo-mini reads pictures only; "
                "give a style picture, or use a Stable Diffusion checkpoint for a style in words"
            )
        codes = [
            self.net.style_code(_crops(p).to(self.device)).mean(0) * w
            for p, w in zip(style.pictures, style.weights, strict=True)
        ]
        vector = self.net.mapping(torch.stack(codes).sum(0, keepdim=True))
        vector = torch.lerp(self.net.mapping.null[None], vector, style.weight)
        return MiniCondition(vector, options.guidance, options.strength)

    def sample(self, condition: MiniCondition, job: WindowJob) -> Tensor:
        schedule = FlowSchedule(job.options.steps)
        x = clean = job.content
        for index, sigma in enumerate(schedule.sigmas):
            job.before_step(index)
            clean = self._predict(x, sigma, condition, job.content, job.motion, job.temporal(index), job.graphs)
            clean = job.fuse(index, clean)
            x = schedule.step(index, x, clean)
        return clean

    def rehearse(self, x: Tensor, options: StylizeOptions) -> Tensor:
        condition = MiniCondition(self.net.mapping.null[None], options.guidance, 1.0)
        motion = x.new_empty(len(x), MOTION_CHANNELS, *x.shape[2:])
        temporal = TemporalContext(len(x), hand_over=0)
        return self._predict(x, 1.0, condition, torch.empty_like(x), motion, temporal, CudaGraphs(False))

    def guides(self, style: Style) -> bool:
        return True

    def evaluations(self, options: StylizeOptions) -> int:
        return options.steps

    def _predict(
        self,
        x: Tensor,
        sigma: float,
        condition: MiniCondition,
        content: Tensor,
        motion: Tensor,
        temporal: TemporalContext,
        graphs: CudaGraphs,
    ) -> Tensor:
        at = torch.full((1,), sigma, device=x.device)
        clean = self._clean(graphs, temporal, x, content, motion, condition.style, at)
        if condition.guidance != 1:
            temporal = replace(temporal, scope="plain." + temporal.scope)
            plain = self._clean(graphs, temporal, x, content, motion, self.net.mapping.null[None], at)
            clean = guide(clean, plain, condition.guidance)
        return torch.lerp(content, clean, condition.strength)

    def _clean(self, graphs: CudaGraphs, temporal: TemporalContext, *given: Tensor) -> Tensor:
        """The network's prediction, its moments in and out of the call as tensors of it."""
        carried = {k.removeprefix(temporal.scope): v for k, v in temporal.carry.items() if k.startswith(temporal.scope)}

        def predict(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            own = dict(zip(carried, tensors[len(given) :], strict=True))
            context = replace(temporal, scope="", carry=own, handed={})
            return self.net.predict(*tensors[: len(given)], context), context.handed

        key = ("predict", temporal.frames, temporal.hand_over, *carried)
        clean, handed = graphs(key, predict, *given, *carried.values())
        temporal.handed.update({temporal.scope + k: v.clone() for k, v in handed.items()})
        return clean.clone()


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


def load(path: Path = BUNDLED, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> MiniBackbone:
    """Loads veo-mini from safetensors.

    Args:
        dtype: that frames are computed in; None is fp16 on an NVIDIA GPU and float32 elsewhere.

    Raises:
        ModelError: the file is missing, damaged, or holds another kind of model.
    """
    header = read_header(path, "veo-mini.safetensors as it came with the pack")
    if not detect(header):
        raise ModelError(
            f"{path} is not veo-mini: {describe(header)}. Give veo-mini.safetensors as it came with the pack"
        )
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
    dtype = dtype or (torch.float16 if torch.device(device).type == "cuda" else torch.float32)
    return MiniBackbone(net.to(device), digest(path), dtype)
