"""Coherence of Magenta and veo-mini, each frame by frame and with the engine's fusion, exact flow and sample clips.

    python benchmarks/coherence.py --magenta FOLDER --out FOLDER [--frames 24] [--weights FILE]

FOLDER of --magenta holds Magenta's two ONNX files. Prints a table and writes coherence.json and contact sheets.
What fuses is the bundled flow network; what judges is exact flow, and on the sample clips iterative Lucas-Kanade of
scikit-image (Le Besnerais and Champagnat 2005), which must be installed. Run it with the pack installed, from any folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_veostyle.veo_core.backbones.mini.backbone import BUNDLED, load
from comfyui_veostyle.veo_core.engine import Stylizer
from comfyui_veostyle.veo_core.metrics.structure import gradient_correlation, ssim
from comfyui_veostyle.veo_core.metrics.temporal import TemporalMetrics, occlusion_mask
from comfyui_veostyle.veo_core.motion.flow import FlowNet, load_flow
from comfyui_veostyle.veo_core.motion.fusion import TemporalFusion, estimate_motion
from comfyui_veostyle.veo_core.options import StylizeOptions
from comfyui_veostyle.veo_core.style.encoder import load_style
from comfyui_veostyle.veo_core.train.data import SIDE, exposure_and_noise, synthetic_clips
from comfyui_veostyle.veo_core.train.teachers import Magenta, load_predictor
from comfyui_veostyle.veo_core.video.codecs import OutputFormat
from comfyui_veostyle.veo_core.video.reader import Clip, open_clip
from comfyui_veostyle.veo_core.video.writer import VideoWriter
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
STYLES = ("great_wave", "van_gogh")
WHO = ("magenta", "magenta fused", "veo-mini", "veo-mini fused")
SHOWN = (0, 20, 21, 22, -1)


def exact_clips(folder: Path, frames: int) -> list[tuple[Clip, torch.Tensor, torch.Tensor]]:
    """Clips with known flow, made of the sample clips' own pictures: path, flow and visibility of each."""
    torch.manual_seed(7)
    stills = []
    for name in ("city", "bunny"):
        for frame in (10, 60):
            image = next(open_clip(EXAMPLES / f"{name}.mp4").frames(first=frame)).image
            for x in (0, image.shape[2] - image.shape[1]):
                square = image[None, :, :, x : x + image.shape[1]]
                stills.append(F.interpolate(square, (SIDE, SIDE), mode="bicubic", antialias=True).clamp(0, 1))
    bank = torch.cat(stills).mul(255).round().byte()
    made = synthetic_clips(bank, 6, frames, 256, top_speed=6.0, still=0.2)
    noisy = exposure_and_noise(made.frames, drift=0.01, noise=0.03)
    out = []
    for i in range(len(noisy)):
        path = folder / f"exact{i}"
        with VideoWriter(path, (256, 256), Fraction(24), output=OutputFormat("png")) as writer:
            writer.write(noisy[i], [Fraction(k, 24) for k in range(frames)])
        out.append((open_clip(path), made.flow[i], made.visible[i]))
    return out


def by_magenta(clip: Clip, style: Path, folder: Path) -> list[torch.Tensor]:
    magenta, predictor = Magenta(folder), load_predictor(folder)
    with Image.open(style) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB").resize((256, 256), Image.Resampling.LANCZOS)))
    with torch.no_grad():
        code = predictor(pixels.movedim(-1, 0)[None].float() / 255)
        return [
            magenta(f.image[None], code)[..., : f.image.shape[1], : f.image.shape[2]].clamp(0, 1) for f in clip.frames()
        ]


def by_veo(engine: Stylizer, clip: Clip, style: Path, folder: Path) -> list[torch.Tensor]:
    """Without fusion."""
    latents = engine.denoise(clip, load_style([style]), StylizeOptions(), folder / "work")
    frames = [f[None].cpu() for chunk in engine.decode(latents, fusion=TemporalFusion(0.0)) for f in chunk]
    latents.store.remove()
    return frames


def fused(frames: list[torch.Tensor], clip: Clip, net: FlowNet) -> list[torch.Tensor]:
    """Any frames after the engine's own fusion along the source's motion."""
    fusion, source, out = TemporalFusion(), [f.image[None] for f in clip.frames()], []
    for i, frame in enumerate(frames):
        height, width = frame.shape[-2:]
        now, before = (F.pad(source[k], (0, -width % 8, 0, -height % 8), mode="replicate") for k in (i, max(0, i - 1)))
        padded = F.pad(frame, (0, -width % 8, 0, -height % 8), mode="replicate")
        out.append(fusion(padded, estimate_motion(net, torch.cat([before, now])))[..., :height, :width].clamp(0, 1))
    return out


def lucas_kanade(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Flow ``[1, 2, H, W]`` from ``now`` to ``before`` in pixels, by other means than the network that fuses."""
    from skimage.registration import optical_flow_ilk

    a, b = (x[0].mean(0).cpu().numpy() for x in (now, before))
    down, right = optical_flow_ilk(a, b, radius=7, num_warp=8, prefilter=True)
    return torch.from_numpy(np.stack([right, down])).float()[None]


def score(frames: list[torch.Tensor], clip: Clip, flows) -> dict[str, float]:
    """Metrics of result frames; ``flows(i, now, before)`` gives flow and visibility of frame i."""
    metrics, structure, source = TemporalMetrics(), [], [f.image[None] for f in clip.frames()]
    for i, now in enumerate(frames):
        structure.append((ssim(now, source[i]), gradient_correlation(now, source[i])))
        if i:
            metrics.add(now, frames[i - 1], source[i], source[i - 1], *flows(i, source[i], source[i - 1]))
        if i > 1:
            metrics.add_triple(torch.cat(frames[i - 2 : i + 1]), torch.cat(source[i - 2 : i + 1]))
    values = metrics.values()
    values["ssim"], values["edges"] = (float(np.mean(v)) for v in zip(*structure, strict=True))
    return values


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--magenta", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=24)
    parser.add_argument("--weights", type=Path, default=BUNDLED)
    parser.add_argument("--exact-only", action="store_true")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    backbone, net = load(a.weights), load_flow(torch.device("cpu"), a.weights)
    engine = Stylizer(backbone, net)
    rows: dict[str, dict[str, float]] = {}

    def run(label: str, clip: Clip, style: str, flows) -> None:
        picture = EXAMPLES / f"{style}.jpg"
        made = {"magenta": by_magenta(clip, picture, a.magenta), "veo-mini": by_veo(engine, clip, picture, a.out)}
        made |= {f"{who} fused": fused(frames, clip, net) for who, frames in made.items()}
        for who in WHO:
            frames = made[who]
            rows[f"{label} {style} {who}"] = score(frames, clip, flows)
            if not label.startswith("exact"):
                shown = [frames[i] for i in SHOWN]
                sheet = torch.cat(shown, dim=3)[0].mul(255).round().byte().movedim(0, -1).numpy()
                Image.fromarray(sheet).save(a.out / f"{label}_{style}_{who}.png")

    with torch.no_grad():
        exact = exact_clips(a.out, a.frames)
        for style in STYLES:
            for i, (clip, flow, visible) in enumerate(exact):
                run(f"exact{i}", clip, style, lambda k, *_, f=flow, v=visible: (f[k : k + 1], v[k : k + 1]))
        for name in () if a.exact_only else ("city", "bunny"):
            clip = open_clip(EXAMPLES / f"{name}.mp4", max_frames=a.frames)
            cache: dict[int, tuple] = {}

            def estimated(k, now, before, cache=cache):
                if k not in cache:
                    there, back = lucas_kanade(now, before), lucas_kanade(before, now)
                    cache[k] = (there, occlusion_mask(there, back))
                return cache[k]

            for style in STYLES:
                run(name, clip, style, estimated)
    columns = ("e_warp", "e_over_variance", "e_over_detail", "detail_share", "still_change", "flicker", "ssim", "edges")
    print(f"{'':32}" + "".join(f"{c[:15]:>17}" for c in columns))
    for who in WHO:
        picked = [v for k, v in rows.items() if k.startswith("exact") and k.endswith(f" {who}")]
        rows[f"exact, mean of {len(picked)} {who}"] = {c: float(np.nanmean([v[c] for v in picked])) for c in columns}
    for label, values in rows.items():
        print(f"{label:32}" + "".join(f"{values[c]:17.5f}" for c in columns))
    (a.out / "coherence.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
