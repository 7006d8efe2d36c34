"""veo-mini in half precision against float32, decoded frames in 255ths: the most, and the 99.9th percentile.

    python benchmarks/half.py [--frames 48]

Needs a GPU, and the pack importable as comfyui_veostyle.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from comfyui_veostyle.veo_core.backbones import load_backbone
from comfyui_veostyle.veo_core.engine import Stylizer
from comfyui_veostyle.veo_core.motion.flow import load_flow
from comfyui_veostyle.veo_core.options import StylizeOptions
from comfyui_veostyle.veo_core.style.encoder import load_style
from comfyui_veostyle.veo_core.video.reader import open_clip

EXAMPLES = Path(__file__).parents[1] / "examples"


def frames_of(dtype: torch.dtype, name: str, style: str, frames: int) -> torch.Tensor:
    cuda = torch.device("cuda")
    engine = Stylizer(load_backbone(None, cuda, dtype), load_flow(cuda))
    with tempfile.TemporaryDirectory() as folder:
        clip = open_clip(EXAMPLES / f"{name}.mp4", max_frames=frames)
        latents = engine.denoise(clip, load_style([EXAMPLES / f"{style}.jpg"]), StylizeOptions(), Path(folder))
        return torch.cat([f.cpu() for f in engine.decode(latents)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=48)
    a = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    for name in ("city", "bunny"):
        for style in ("great_wave", "van_gogh"):
            whole, half = (frames_of(d, name, style, a.frames) for d in (torch.float32, torch.float16))
            apart = (whole - half).abs() * 255
            sample = apart.flatten()[:: max(1, apart.numel() // 10_000_000)]
            print(
                name,
                style,
                f"most {apart.max():.3f}, 99.9 % {sample.quantile(0.999):.3f}, mean {apart.mean():.4f} of 255",
            )


if __name__ == "__main__":
    main()
