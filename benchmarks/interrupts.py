"""The nodes through a real ComfyUI's comfy package, interrupted at random twenty times: what is left afterwards.

    COMFYUI_PATH=... PYTHONPATH=folder-with-a-link-named-comfyui_veostyle python benchmarks/interrupts.py --out FOLDER \\
        --clip CLIP --style PICTURE

Runs model, scenes, denoiser, decoder, compare and save whole once, then with ComfyUI's own interrupt at random moments, each time
from a changed seed so that nothing is resumed. Prints the stage of each, what stays allocated against what did before, and
partial files; at last a whole run again, which must give the frames of the first. Writes interrupts.json.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import random
import sys
import threading
import time
import types
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--clip", type=Path, required=True)
parser.add_argument("--style", type=Path, required=True)
parser.add_argument("--frames", type=int, default=75)
parser.add_argument("--width", type=int, default=0)
parser.add_argument("--times", type=int, default=20)
parser.add_argument("--cpu", action="store_true")
arguments = parser.parse_args()
core = os.environ["COMFYUI_PATH"]
sys.argv = ["x", *(["--cpu"] if arguments.cpu else [])]
sys.path.insert(0, core)
os.chdir(core)
logging.disable(logging.INFO)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management  # noqa: E402

told: list[str] = []
server = types.ModuleType("server")
server.PromptServer = types.SimpleNamespace(
    instance=types.SimpleNamespace(send_progress_text=lambda text, node: told.append(text))
)
sys.modules["server"] = server

import folder_paths  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from comfyui_veostyle.nodes.decode import VAEDecode  # noqa: E402
from comfyui_veostyle.nodes.denoise import STNormDenoiser  # noqa: E402
from comfyui_veostyle.nodes.model import LoadModel  # noqa: E402
from comfyui_veostyle.nodes.output import Compare, SaveVideo  # noqa: E402
from comfyui_veostyle.nodes.video import Scenes  # noqa: E402
from comfyui_veostyle.veo_core.style.encoder import load_style  # noqa: E402
from comfyui_veostyle.veo_core.video.reader import open_clip  # noqa: E402

MIB = 1 << 20


def node(kind: type) -> type:
    """A node class as core would call it."""
    return type(kind.__name__, (kind,), {"hidden": types.SimpleNamespace(unique_id="1", prompt={}, extra_pnginfo={})})


def allocated() -> float:
    """MiB on the GPU; of the process without one."""
    gc.collect()
    if arguments.cpu:
        return psutil.Process().memory_info().rss / MIB
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / MIB


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder_paths.set_output_directory(str(arguments.out / "output"))
    folder_paths.set_temp_directory(str(arguments.out / "temp"))
    clip = open_clip(arguments.clip, max_frames=arguments.frames, width=arguments.width)
    style = load_style([arguments.style])
    with torch.inference_mode():
        model = node(LoadModel).execute("veo-mini").args[0]

    def run(seed: int) -> str:
        with torch.inference_mode():
            node(Scenes).execute(clip)
            latent = node(STNormDenoiser).execute(model, clip, style, 0, 0.0, 1.0, seed).args[0]
            video, memory = node(VAEDecode).execute(latent, model).args
        if not seed:
            print(memory.describe(), flush=True)
        both = node(Compare).execute(clip, video, "split").args[0]
        node(SaveVideo).execute(both, "saved", "vp9")
        return hashlib.sha256(Path(video.get_stream_source()).read_bytes()).hexdigest()[:16]

    first = run(0)
    begin = time.perf_counter()
    run(1)
    length, before = time.perf_counter() - begin, allocated()
    print(f"a whole run: {length:.2f} s, {before:.1f} MiB stay allocated", flush=True)
    choose, rows = random.Random(0), []
    for number in range(arguments.times):
        # The survey is short; some are to fall into it.
        after = choose.uniform(0.0, 0.1 if number % 4 == 0 else 0.95) * length
        timer = threading.Timer(after, comfy.model_management.interrupt_current_processing)
        timer.start()
        begin, end = time.perf_counter(), "finished"
        try:
            run(2 + number)
        except comfy.model_management.InterruptProcessingException:
            end = told[-1].split(":")[0]
        waited = time.perf_counter() - begin - after
        timer.cancel()
        comfy.model_management.interrupt_current_processing(False)
        kept = allocated()
        parts = [str(p) for p in arguments.out.rglob("*") if ".part" in p.name]
        rows.append(
            {"at": after, "stage": end, "waited": waited, "kept_mib": kept, "change": kept / before - 1, "parts": parts}
        )
        print(
            f"{number + 1}: at {after:.2f} s while {end}, stopped {waited:.2f} s later, "
            f"{kept:.1f} MiB ({100 * (kept / before - 1):+.2f} %), {len(parts)} partial files",
            flush=True,
        )
    again = run(0)
    print(f"the first run again: {'the same file' if again == first else 'another file'}, {allocated():.1f} MiB")
    worst = max(abs(row["change"]) for row in rows)
    print(f"worst change {100 * worst:.2f} %, stages {sorted({r['stage'] for r in rows})}")
    (arguments.out / "interrupts.json").write_text(json.dumps({"runs": rows, "same": again == first, "worst": worst}))


if __name__ == "__main__":
    main()
