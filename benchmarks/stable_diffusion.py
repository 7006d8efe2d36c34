"""SD 1.5 shapes with random weights: seconds and peak memory of this engine beside diffusers' own pipelines.

    python benchmarks/stable_diffusion.py --out FOLDER [--device cuda] [--frames 48] [--long 240] [--steps 10] [--tiny]
    python benchmarks/stable_diffusion.py --out FOLDER --headline --frames 240 --steps 50 [--before FOLDER]

All do the same number of evaluations of the UNet a frame (denoise 1). Weights are random: speed and bytes do not care.
Run it with the pack importable as comfyui_veostyle, from any folder. Prints a table and writes stable_diffusion.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from comfyui_veostyle.veo_core.backbones.stable_diffusion.backbone import StableDiffusionBackbone
from comfyui_veostyle.veo_core.backbones.stable_diffusion.files import Parts
from comfyui_veostyle.veo_core.engine import Stylizer
from comfyui_veostyle.veo_core.memory.plan import StagePeaks
from comfyui_veostyle.veo_core.memory.trace import trace_memory
from comfyui_veostyle.veo_core.motion.flow import FlowNet
from comfyui_veostyle.veo_core.options import parse_options
from comfyui_veostyle.veo_core.style.encoder import style_from_tensors
from comfyui_veostyle.veo_core.style.injection import PRESETS
from comfyui_veostyle.veo_core.style.prompts import parse_prompts
from comfyui_veostyle.veo_core.video.reader import open_clip
from comfyui_veostyle.veo_core.video.writer import VideoWriter

SCHEDULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "timestep_spacing": "leading",
}  # fmt: skip
MIB = 1 << 20


def make_parts(device: str, tiny: bool) -> Parts:
    """Networks of SD 1.5's sizes, or with a tenth of its widths."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    widths, vae_widths, text = ((320, 640, 1280, 1280), (128, 256, 512, 512), 768)
    if tiny:
        widths, vae_widths, text = (32, 32, 64, 64), (32, 32, 32, 32), 64
    torch.manual_seed(0)
    with torch.device(device):
        unet = UNet2DConditionModel(
            sample_size=64, block_out_channels=widths, cross_attention_dim=text, attention_head_dim=8
        )
        vae = AutoencoderKL(
            block_out_channels=vae_widths, layers_per_block=2, scaling_factor=0.18215,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
        config = CLIPTextConfig(hidden_size=text, intermediate_size=4 * text, num_attention_heads=max(1, text // 64))
        encoder = CLIPTextModel(config)
    dtype = torch.float16 if device == "cuda" else torch.float32
    return Parts(
        "sd15", *(m.to(dtype).eval().requires_grad_(False) for m in (unet, vae)), [encoder.to(dtype)], SCHEDULER
    )


def make_clip(path: Path, side: int, frames: int) -> Path:
    coarse = torch.rand(1, 3, side // 16, side // 16 + frames // 8 + 1)
    scene = torch.nn.functional.interpolate(coarse, (side, side + frames), mode="bicubic").clamp(0, 1)
    with VideoWriter(path, (side, side), Fraction(24)) as writer:
        for i in range(frames):
            writer.write(scene[..., i : i + side], [Fraction(i, 24)])
    return path


def measured(device: str, job, first=None) -> tuple[float, float]:
    """Seconds and peak MiB of a job, weights included, after a first run of its own, or of a smaller one."""
    cuda = device == "cuda"
    (first or job)()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    job()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / MIB if cuda else 0.0


def ours(engine: Stylizer, video: Path, out: Path, options, style, budget: int | None):
    """The engine's whole run but for writing a file."""

    def job() -> None:
        clip = open_clip(video)
        plan = engine.plan(clip, options, budget)
        latents = engine.denoise(clip, style, options, out / "work", plan)
        for frames in engine.decode(latents):
            frames.cpu()
        latents.store.remove()

    return job


def image_to_image(parts: Parts, side: int, frames: int, steps: int, device: str, size: int):
    """diffusers' image-to-image, so many frames at a time."""
    from diffusers import DDIMScheduler, StableDiffusionImg2ImgPipeline

    pipeline = StableDiffusionImg2ImgPipeline(
        vae=parts.vae, text_encoder=None, tokenizer=None, unet=parts.unet, safety_checker=None, feature_extractor=None,
        scheduler=DDIMScheduler.from_config(SCHEDULER), requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    words = torch.randn(1, 77, parts.unet.config.cross_attention_dim, device=device, dtype=parts.unet.dtype)
    pictures = torch.rand(frames, 3, side, side)

    def job() -> None:
        for begin in range(0, frames, size):
            batch = pictures[begin : begin + size].to(device, parts.unet.dtype)
            repeated = {k: words.expand(len(batch), -1, -1) for k in ("prompt_embeds", "negative_prompt_embeds")}
            pipeline(
                image=batch * 2 - 1,
                output_type="pt",
                num_inference_steps=steps,
                strength=1.0,
                guidance_scale=7.0,
                **repeated,
            ).images.cpu()

    return job


def animatediff(parts: Parts, side: int, frames: int, steps: int, device: str):
    """diffusers' AnimateDiff video-to-video, 16 frames at a time."""
    from diffusers import AnimateDiffVideoToVideoPipeline, DDIMScheduler, MotionAdapter
    from torchvision.transforms.functional import to_pil_image

    with torch.device(device):
        adapter = MotionAdapter(block_out_channels=tuple(parts.unet.config.block_out_channels)).to(parts.unet.dtype)
    pipeline = AnimateDiffVideoToVideoPipeline(
        vae=parts.vae, text_encoder=None, tokenizer=None, unet=parts.unet, motion_adapter=adapter,
        scheduler=DDIMScheduler.from_config(SCHEDULER),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(device)
    parts.unet = pipeline.unet  # the pipeline has made a UNet of its own from it
    words = torch.randn(1, 77, parts.unet.config.cross_attention_dim, device=device, dtype=parts.unet.dtype)
    pictures = torch.rand(frames, 3, side, side)

    def job() -> None:
        for begin in range(0, frames, 16):
            pipeline(
                video=[[to_pil_image(p) for p in pictures[begin : begin + 16]]], prompt_embeds=words,
                negative_prompt_embeds=words, height=side, width=side, output_type="pt", num_inference_steps=steps,
                strength=1.0, guidance_scale=7.0,
            )  # fmt: skip

    return job


def stage_peaks(engine: Stylizer, options, side: int, chunk: int) -> dict[str, tuple[float, float]]:
    """Traced and measured MiB of each stage's computation alone."""
    peaks, out = StagePeaks(engine.backbone, engine.flow, (side, side), options), {}
    for stage, job in peaks.jobs(chunk).items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            job()
        out[stage] = (trace_memory(job).peak / MIB, (torch.cuda.max_memory_allocated() - before) / MIB)
        print(f"{stage:10s} traced {out[stage][0]:8.0f} MiB, measured {out[stage][1]:8.0f} MiB", flush=True)
    return out


def alone(*arguments: str, folder: Path | None = None) -> tuple[float, float]:
    """This script in a process of its own, so that no other model's weights count; of another checkout where asked."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return tuple(json.loads(run.stdout.splitlines()[-1]))


def peer(name: str, a: argparse.Namespace) -> tuple[float, float]:
    parts = make_parts(a.device, a.tiny)
    size = {"one frame at a time": 1, "16 at a time": 16}

    def job(frames: int, steps: int):
        if name == "AnimateDiff":
            return animatediff(parts, a.side, frames, steps, a.device)
        return image_to_image(parts, a.side, frames, steps, a.device, size[name])

    first = job(16, 3) if a.headline else None
    with torch.no_grad():
        return measured(a.device, job(a.frames, a.steps), first)


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--long", type=int, default=240)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", default="", help="only rows that contain one of these words, separated by semicolons")
    parser.add_argument("--headline", action="store_true", help="words alone beside AnimateDiff, each timed once")
    parser.add_argument("--before", type=Path, help="a folder with another checkout as comfyui_veostyle, timed as well")
    parser.add_argument("--peer", default="", help="that peer of diffusers alone")
    parser.add_argument(
        "--json", action="store_true", help="print the first row's figures last, and nothing after them"
    )
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.peer:
        print(json.dumps(peer(a.peer, a)))
        return
    parts = make_parts(a.device, a.tiny)
    backbone = StableDiffusionBackbone(parts, "random", "ddim", "normal")
    engine = Stylizer(backbone, FlowNet().to(a.device).eval())
    pictures = style_from_tensors([torch.rand(3, 512, 512)], prompts=parse_prompts("a painting", "blurry"))
    words = style_from_tensors([], prompts=parse_prompts("a painting", "blurry"))
    short, long = (make_clip(a.out / f"{n}.mp4", a.side, n) for n in (a.frames, a.long))
    apart = PRESETS["balanced"].model_copy(update={"sources": ("self",), "norm": 0.0, "latent_norm": 0.0})
    common = {"steps": a.steps, "guidance": 7.0, "denoise": 1.0}
    whole, plain = parse_options(**common), parse_options(**common, injection=apart)
    light = parse_options(**common, injection=PRESETS["balanced"].model_copy(update={"query": 0.0}))
    predicted = engine.plan(open_clip(short), whole)
    least = predicted.weights + predicted.stages["denoise"] + 256 * MIB
    runs = {
        "veostyle, balanced": partial(ours, engine, short, a.out, whole, pictures, None),
        f"veostyle, balanced, {a.long} frames": partial(ours, engine, long, a.out, whole, pictures, None),
        "veostyle, balanced, least budget": partial(ours, engine, short, a.out, whole, pictures, least),
        "veostyle, balanced, query 0": partial(ours, engine, short, a.out, light, pictures, None),
        "veostyle, words, cross-frame": partial(ours, engine, short, a.out, whole, words, None),
        "veostyle, words, frames apart": partial(ours, engine, short, a.out, plain, words, None),
    }
    first = None
    if a.headline:
        few = whole.model_copy(update={"steps": 3})
        first = ours(engine, make_clip(a.out / "first.mp4", a.side, 32), a.out, few, words, None)
    rows = {}
    wanted = ["words, cross-frame"] if a.headline else [w for w in a.rows.split(";") if w]

    def shown(name: str, figures: tuple[float, float]) -> None:
        rows[name] = figures
        print(f"{name:34s} {figures[0]:8.2f} s {figures[1]:8.0f} MiB", flush=True)

    for name, make in runs.items():
        if wanted and not any(w in name for w in wanted):
            continue
        with torch.no_grad():
            shown(name, measured(a.device, make(), first))
        if a.json:
            print(json.dumps(rows[name]))
            return
    stages = {}
    if a.device == "cuda" and not a.headline:
        stages = stage_peaks(
            engine, whole.for_backbone(backbone.defaults, backbone.reads), a.side, predicted.decode_chunk
        )
    del runs, make, first, engine, backbone, parts
    gc.collect()
    torch.cuda.empty_cache()
    if a.before:
        shown("the same before", alone("--rows", "words, cross-frame", "--json", folder=a.before))
    for name in ("AnimateDiff",) if a.headline else ("one frame at a time", "16 at a time", "AnimateDiff"):
        if a.headline or not wanted or any(w in name for w in wanted):
            # It takes 16 frames at a time, each on their own: fewer of them say as much.
            fewer = ["--frames", str(min(a.frames, 48))] if a.headline else []
            shown(" ".join(["diffusers,", name, *fewer]), alone("--peer", name, *fewer))
    print(f"plan for balanced: peak {predicted.peak / MIB:.0f} MiB\n{predicted.describe()}")
    (a.out / "stable_diffusion.json").write_text(
        json.dumps({"runs": rows, "planned_mib": predicted.peak / MIB, "stages": stages})
    )


if __name__ == "__main__":
    main()
