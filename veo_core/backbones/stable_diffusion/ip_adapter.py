"""IP-Adapter: style pictures through CLIP into the UNet's cross-attention (Ye et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...style.clip import ImageTower, load_image_tower
from ...weights_file import describe, digest, read_header, read_tensors

EXPECTED = "an IP-Adapter for SD 1.5 or SDXL, plain or plus (safetensors)"
Blocks = Literal["all", "style"]
# The blocks that carry style and not layout: InstantStyle (Wang et al. 2024) for SDXL, and the up block of the same
# resolution in SD 1.5.
STYLE_BLOCKS = {"sd15": "up_blocks.1.", "sdxl": "up_blocks.0.attentions.1."}


@dataclass(frozen=True)
class IPAdapter:
    """An IP-Adapter matched to a UNet.

    Attributes:
        projection: CLIP's features to tokens. processors: of the UNet's cross-attentions, by name.
        tower: CLIP's image encoder. plus: whether tokens come from its last but one layer.
    """

    projection: nn.Module
    processors: dict[str, nn.Module]
    tower: ImageTower
    plus: bool
    digest: str

    @torch.no_grad()
    def tokens(self, pictures: list[Tensor], shares: list[float]) -> tuple[Tensor, Tensor]:
        """Tokens ``[1, k, D]`` of pictures blended by shares, and of no picture.

        Args:
            pictures: ``[3, H, W]`` in 0..1. shares: sum 1.
        """
        side = self.tower.network.image_size[0]
        seen = self.tower(pictures)
        if self.plus:
            weight = self.tower.network.conv1.weight
            nothing = self.tower.features(torch.zeros(1, 3, side, side).to(weight)).hidden
            features = torch.cat([seen.hidden, nothing])
        else:
            features = torch.cat([seen.pooled, torch.zeros_like(seen.pooled[:1])])
        dtype = next(self.projection.parameters()).dtype
        tokens = self.projection(features.to(dtype))
        weights = torch.tensor(shares, device=tokens.device, dtype=tokens.dtype)[:, None, None]
        return (tokens[:-1] * weights).sum(0, keepdim=True), tokens[-1:]

    def modules(self) -> list[nn.Module]:
        """All networks."""
        return [self.projection, self.tower, *self.processors.values()]


def load_ip_adapter(
    path: Path,
    clip_vision: str | Path,
    unet: nn.Module,
    architecture: str,
    blocks: Blocks = "all",
    download: bool = False,
) -> IPAdapter:
    """Reads an IP-Adapter and its image encoder; the encoder is fetched by name only where ``download`` allows it.

    Raises:
        ModelError: the file is something else, or for another base, or goes with another image encoder.
    """
    header = read_header(path, EXPECTED)
    if not any(k.startswith("ip_adapter.") for k in header) or not any(k.startswith("image_proj.") for k in header):
        raise ModelError(f"{path} is no IP-Adapter: {describe(header)}. Give {EXPECTED}")
    plus = "image_proj.latents" in header
    if not plus and "image_proj.proj.weight" not in header:
        raise ModelError(f"{path} is an IP-Adapter of another kind (FaceID or full face). Give {EXPECTED}")
    cross = unet.config.cross_attention_dim
    keys = [k for k in header if k.endswith("to_k_ip.weight")]
    wanted = sum(n.endswith("attn2") for n, _ in unet.named_modules() if "motion_modules" not in n)
    if header[keys[0]][1] != cross or len(keys) != wanted:
        raise ModelError(
            f"{path} is for a model with {len(keys)} cross-attentions {header[keys[0]][1]} wide, "
            f"and this one has {wanted}, {cross} wide; give the IP-Adapter for this base"
        )
    tower = load_image_tower(clip_vision, download)
    given = tower.network.conv1.weight.shape[0] if plus else tower.network.output_dim
    taken = header["image_proj.proj_in.weight" if plus else "image_proj.proj.weight"][1]
    if given != taken:
        raise ModelError(
            f"{path} takes image features of {taken}, and {clip_vision} gives {given}; give the encoder it was made with"
        )
    tensors = read_tensors(path, dtype=torch.float32)
    state = {
        part: {k.removeprefix(f"{part}."): v for k, v in tensors.items() if k.startswith(f"{part}.")}
        for part in ("image_proj", "ip_adapter")
    }
    try:
        processors = unet._convert_ip_adapter_attn_to_diffusers([state], low_cpu_mem_usage=False)
        projection = unet._convert_ip_adapter_image_proj_to_diffusers(state["image_proj"], low_cpu_mem_usage=False)
    except (KeyError, RuntimeError) as e:
        raise ModelError(f"{path} does not fit this base ({str(e).splitlines()[0]})") from e
    wanted_blocks = STYLE_BLOCKS[architecture] if blocks == "style" else ""
    kept = {
        name.removesuffix(".processor"): p
        for name, p in processors.items()
        if isinstance(p, nn.Module) and name.startswith(wanted_blocks)
    }
    device, dtype = unet.device, unet.dtype
    seen_by = digest(Path(clip_vision)) if Path(clip_vision).exists() else clip_vision
    adapter = IPAdapter(projection, kept, tower, plus, f"{digest(path)}-{blocks}-{seen_by}")
    for module in adapter.modules():
        module.to(device, dtype if module is not tower else None).eval().requires_grad_(False)
    return adapter


class ImageTokens:
    """Tokens for the batch that the UNet is about to see ``[B, k, D]``; None leaves pictures out."""

    def __init__(self):
        self.batch: Tensor | None = None


@contextmanager
def pictured(unet: nn.Module, adapter: IPAdapter | None, scale: float) -> Iterator[ImageTokens]:
    """In this block the UNet's cross-attentions read the tokens given; afterwards nothing of it is left."""
    tokens = ImageTokens()
    with ExitStack() as stack:
        for name, processor in (adapter.processors if adapter and scale else {}).items():
            attention = unet.get_submodule(name)
            stack.callback(setattr, attention, "processor", attention.processor)
            attention.processor = _with_pictures(processor, attention.processor, tokens, scale)
        yield tokens


def _with_pictures(processor: nn.Module, plain, tokens: ImageTokens, scale: float):
    def process(attn, hidden_states: Tensor, encoder_hidden_states=None, attention_mask=None, temb=None) -> Tensor:
        if tokens.batch is None:
            return plain(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        processor.scale = [scale]
        both = (encoder_hidden_states, [tokens.batch.to(hidden_states.dtype)])
        return processor(attn, hidden_states, both, attention_mask, temb)

    return process
