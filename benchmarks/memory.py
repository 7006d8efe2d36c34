"""Predicted against measured peak memory, and peaks for 48 and for 480 frames. Weights are random: bytes do not care.

    python benchmarks/memory.py --device cuda --out FOLDER [--sizes 512x288,1280x720,1920x1080] [--lengths 48,480]

Each run is a process of its own, so that its host peak is its own. Prints a table and writes memory.json.
Run it with the pack importable as comfyui_veostyle, from any folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import torch


def make_clip(path: Path, size: tuple[int, int], frames: int) -> None:
    from comfyui_veostyle.veo_core.video.writer import VideoWriter

    torch.manual_seed(0)
    width, height = size
    picture = torch.nn.functional.interpolate(
        torch.rand(1, 3, height // 16, width // 16), (height, width), mode="bicubic"
    )
    with VideoWriter(path, size, Fraction(24)) as writer:
        for i in range(frames):
            writer.write(picture.roll(i, 3).clamp(0, 1), [Fraction(i, 24)])


def one_run(video: Path, device: str, out: Path) -> dict[str, float]:
    """Stylises a clip and tells what was predicted and what was used, in MiB."""
    from comfyui_veostyle.veo_core.backbones.mini.backbone import MiniBackbone
    from comfyui_veostyle.veo_core.backbones.mini.network import MiniNetwork
    from comfyui_veostyle.veo_core.engine import Stylizer
    from comfyui_veostyle.veo_core.memory.plan import StagePeaks, padded_size
    from comfyui_veostyle.veo_core.motion.flow import FlowNet
    from comfyui_veostyle.veo_core.options import StylizeOptions
    from comfyui_veostyle.veo_core.render import render
    from comfyui_veostyle.veo_core.style.encoder import style_from_tensors
    from comfyui_veostyle.veo_core.video.reader import open_clip

    torch.manual_seed(0)
    backbone = MiniBackbone(MiniNetwork().to(device), "random", torch.float16 if device == "cuda" else torch.float32)
    engine = Stylizer(backbone, FlowNet().to(device).eval())
    clip, style = open_clip(video), style_from_tensors([torch.rand(3, 256, 256)])
    plan = engine.plan(clip, StylizeOptions())
    mib = 1 << 20
    stages = {}
    if device == "cuda":
        peaks = StagePeaks(
            backbone,
            engine.flow,
            padded_size(clip.size, 8),
            StylizeOptions().for_backbone(backbone.defaults, backbone.reads),
        )
        for count in (1, plan.decode_chunk):
            for stage, job in peaks.jobs(count).items():
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                with torch.no_grad():
                    job()
                traced = peaks.peak(stage, count) - (0 if stage == "decode" else peaks.resident)
                stages[f"{stage}{count}_ratio"] = (torch.cuda.max_memory_allocated() - before) / traced
    host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    latents = engine.denoise(clip, style, StylizeOptions(), out / "work", plan)
    denoised = time.perf_counter()
    if device == "cuda":
        stages["denoise_peak"] = torch.cuda.max_memory_allocated() / mib
    render(engine, latents, out / "result.mp4")
    end = time.perf_counter()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    measured = (
        torch.cuda.max_memory_allocated() / mib
        if device == "cuda"
        else host - host_before + backbone.weight_bytes / mib
    )
    frames = latents.survey.frames
    latents.store.remove()
    return {
        "frames": frames,
        "chunks": plan.decode_chunk,
        "predicted": plan.peak / mib,
        "measured": measured,
        "host_peak": host,
        "denoise_fps": frames / (denoised - begin),
        "decode_fps": frames / (end - denoised),
        **{f"planned_{k}": v / mib for k, v in plan.stages.items()},
        **stages,
    }


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="512x288,1280x720,1920x1080")
    parser.add_argument("--lengths", default="48,480")
    parser.add_argument("--one", type=Path, help="run on this video in this process")
    a = parser.parse_args()
    if a.lengths.count(",") != 1:
        parser.error(f"--lengths {a.lengths}: give two, such as 48,480")
    a.out.mkdir(parents=True, exist_ok=True)
    if a.one:
        print(json.dumps(one_run(a.one, a.device, a.out)))
        return
    jobs = [(s, 24) for s in a.sizes.split(",")] + [(a.sizes.split(",")[0], int(n)) for n in a.lengths.split(",")]
    rows = {}
    for size, frames in jobs:
        video = a.out / f"clip_{size}_{frames}.mp4"
        make_clip(video, tuple(map(int, size.split("x"))), frames)
        command = [sys.executable, __file__, "--device", a.device, "--out", str(a.out), "--one", str(video)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        row = rows[f"{size} {frames} frames"] = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{size:>10} {frames:4}", " ".join(f"{k} {v:.2f}" for k, v in row.items() if k != "frames"), flush=True)
        error = row["predicted"] / row["measured"] - 1
        print(f"{'':15} predicted against measured {error:+.1%}", flush=True)
    short, long = (rows[f"{a.sizes.split(',')[0]} {n} frames"] for n in a.lengths.split(","))
    for what in ("measured", "host_peak"):
        print(f"{what}: {a.lengths} frames {short[what]:.1f} {long[what]:.1f} MiB, {long[what] / short[what] - 1:+.1%}")
    (a.out / "memory.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
