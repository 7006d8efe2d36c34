"""How fast veo-mini runs from file to file, by stage, and what it takes; several versions of the pack in one call.

    python benchmarks/speed.py --out FOLDER [--device cuda] [--sizes 512x288,1920x1080] [--frames 240] [--steps 1]
                               [--package now=. --package before=FOLDER]

Each run is a process of its own; of two in it the second is timed. The clip is examples/city.mp4, scaled and repeated. Peaks:
of what PyTorch allocated, and of what it took from the device, where graphs and slack count.
Prints a table and writes speed.json. `--profile` adds where the host's time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_clip(path: Path, size: tuple[int, int], frames: int) -> None:
    import av

    width, height = size
    with av.open(ROOT / "examples" / "city.mp4") as source:
        pictures = [f.reformat(width, height, "yuv420p") for f in source.decode(video=0)]
    there_and_back = pictures + pictures[-2:0:-1]
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"preset": "medium", "crf": "18"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            frame = there_and_back[i % len(there_and_back)]
            frame.pts, frame.time_base = i, Fraction(1, 25)
            frame.pict_type = 0
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def one_run(video: Path, device: str, steps: int, out: Path) -> dict[str, float]:
    """Seconds by stage and the peak in MiB."""
    import torch
    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.engine import Stylizer
    from comfyui_veostyle.veo_core.motion.flow import load_flow
    from comfyui_veostyle.veo_core.options import StylizeOptions
    from comfyui_veostyle.veo_core.render import render
    from comfyui_veostyle.veo_core.style.encoder import load_style
    from comfyui_veostyle.veo_core.video.reader import open_clip
    from comfyui_veostyle.veo_core.video.scenes import survey

    where = torch.device(device)
    cuda = where.type == "cuda"
    engine = Stylizer(load_backbone(None, where), load_flow(where))
    style, options = load_style([ROOT / "examples" / "great_wave.jpg"]), StylizeOptions(steps=steps)
    clip = open_clip(video)
    begin = time.perf_counter()
    survey(clip)
    surveyed = time.perf_counter() - begin
    begin = time.perf_counter()
    plan = engine.plan(clip, options)
    planned = time.perf_counter() - begin
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    latents = engine.denoise(clip, style, options, out / "work", plan)
    if cuda:
        torch.cuda.synchronize()
    denoised = time.perf_counter()
    render(engine, latents, out / "result.mp4")
    end = time.perf_counter()
    frames = latents.survey.frames
    latents.store.remove()
    return {
        "frames": frames,
        "fps": frames / (end - begin),
        "plan_s": planned,
        "survey_s": surveyed,
        "denoise_s": denoised - begin - surveyed,
        "decode_s": end - denoised,
        "peak_mib": torch.cuda.max_memory_allocated() / (1 << 20) if cuda else 0,
        "reserved_mib": torch.cuda.max_memory_reserved() / (1 << 20) if cuda else 0,
        "chunks": f"{plan.encode_chunk}/{plan.decode_chunk}",
    }


def child(a: argparse.Namespace) -> None:
    import cProfile
    import pstats

    out = Path(a.out)
    one_run(Path(a.child), a.device, a.steps, out)
    if a.profile:
        profile = cProfile.Profile()
        profile.runcall(one_run, Path(a.child), a.device, a.steps, out)
        with (out / "profile.txt").open("w") as told:
            pstats.Stats(profile, stream=told).sort_stats("tottime").print_stats(45)
    print("RESULT " + json.dumps(one_run(Path(a.child), a.device, a.steps, out)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="512x288,1920x1080")
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--package", action="append", default=[])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child")
    a = parser.parse_args()
    if a.child:
        child(a)
        return
    rows = []
    for size in a.sizes.split(","):
        for package in a.package or ["now=" + str(ROOT)]:
            name, _, folder = package.partition("=")
            with tempfile.TemporaryDirectory() as scratch:
                os.symlink(Path(folder).resolve(), Path(scratch) / "comfyui_veostyle")
                video = Path(scratch) / "clip.mp4"
                make_clip(video, tuple(map(int, size.split("x"))), a.frames)
                command = [
                    sys.executable, __file__, "--child", str(video), "--out", scratch, "--device", a.device,
                    "--steps", str(a.steps), *(["--profile"] if a.profile else []),
                ]  # fmt: skip
                path = os.pathsep.join([scratch, os.environ.get("PYTHONPATH", "")])
                done = subprocess.run(
                    command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=scratch
                )
                found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not found:
                    print(done.stdout[-2000:], done.stderr[-4000:])
                    continue
                rows.append({"version": name, "size": size} | json.loads(found[-1].removeprefix("RESULT ")))
                if a.profile:
                    (Path(a.out) / f"profile-{name}-{size}.txt").write_text((Path(scratch) / "profile.txt").read_text())
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    (Path(a.out) / "speed.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
