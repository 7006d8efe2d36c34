"""A MODEL of SD 1.5's sizes with random weights through a real ComfyUI's comfy package on the GPU, ten runs.

    COMFYUI_PATH=... PYTHONPATH=folder-with-a-link-named-comfyui_veostyle python benchmarks/comfyui_core.py --out FOLDER

Core's memory management moves MODEL and VAE, the engine runs windows through core's sampler. Prints seconds, peak and
what stays allocated after each run, and core's own KSampler on the same batch; writes comfyui_core.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--frames", type=int, default=28)
parser.add_argument("--side", type=int, default=512)
parser.add_argument("--runs", type=int, default=10)
parser.add_argument("--tiny", action="store_true")
arguments = parser.parse_args()
core = os.environ["COMFYUI_PATH"]
sys.argv = ["x", *(["--cpu"] if arguments.tiny else [])]
sys.path.insert(0, core)
os.chdir(core)
logging.disable(logging.INFO)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.supported_models as models  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencoderKL  # noqa: E402
from comfyui_veostyle.nodes.comfy_backbone import ComfyBackbone  # noqa: E402
from comfyui_veostyle.nodes.model import loaded  # noqa: E402
from comfyui_veostyle.veo_core.memory.watch import RunMemory  # noqa: E402
from comfyui_veostyle.veo_core.options import parse_options  # noqa: E402
from comfyui_veostyle.veo_core.style.encoder import style_from_tensors  # noqa: E402
from comfyui_veostyle.veo_core.style.prompts import parse_prompts  # noqa: E402
from comfyui_veostyle.veo_core.video.reader import open_clip  # noqa: E402
from stable_diffusion import make_clip  # noqa: E402

MIB = 1 << 20
torch.set_grad_enabled(False)


class Words:
    """Stands in for a CLIP: random tokens."""

    def tokenize(self, text: str) -> str:
        return text

    def encode_from_tokens_scheduled(self, text: str) -> list:
        generator = torch.Generator().manual_seed(len(text))
        return [[torch.randn(1, 77, 768, generator=generator), {"pooled_output": torch.zeros(1, 1280)}]]


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for p in module.parameters():
        p.data = torch.randn_like(p) / max(1, p[0].numel()) ** 0.5 if p.ndim > 1 else torch.ones_like(p)
    return module.eval()


def make_model():
    config = dict(models.SD15.unet_config)
    config |= {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "num_heads": 8,
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "transformer_depth_middle": 1, "legacy": False,
        "use_spatial_transformer": True, "adm_in_channels": None, "dtype": torch.float16,
    }  # fmt: skip
    if arguments.tiny:
        config |= {"model_channels": 32, "num_heads": 4, "dtype": torch.float32}
    made = models.SD15(config)
    made.set_inference_dtype(config["dtype"], None)
    model = randomised(made.get_model({}, "", device=torch.device("cpu")).to(config["dtype"]))
    device = comfy.model_management.get_torch_device()
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))
    shape = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": 32 if arguments.tiny else 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [],
        "dropout": 0.0,
    }  # fmt: skip
    vae = randomised(AutoencoderKL(ddconfig=shape, embed_dim=4))
    return patcher, comfy.sd.VAE(sd=vae.state_dict(), config={"params": {"ddconfig": shape, "embed_dim": 4}})


def memory() -> tuple[float, float]:
    """Allocated and peak MiB on the GPU."""
    if not torch.cuda.is_available():
        return 0.0, 0.0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, vae = make_model()
    clip = open_clip(make_clip(arguments.out / "clip.mp4", arguments.side, arguments.frames))
    style = style_from_tensors([torch.rand(3, 512, 512)], prompts=parse_prompts("a painting", "blurry"))
    options = parse_options(steps=10, guidance=7.0, denoise=1.0)
    node = loaded(ComfyBackbone(model, vae, Words(), "euler", "normal", "random"))
    rows = []
    for number in range(arguments.runs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        plan = node.plan(clip, options, RunMemory())
        latents = node.engine.denoise(clip, style, options, arguments.out / "work", plan)
        finite = all(bool(frames.isfinite().all()) for frames in node.engine.decode(latents))
        latents.store.remove()
        gc.collect()
        kept, peak = memory()
        rows.append({"seconds": time.perf_counter() - begin, "kept_mib": kept, "peak_mib": peak, "finite": finite})
        print(f"run {number}: {rows[-1]}", flush=True)
    print(f"planned {plan.peak / MIB:.0f} MiB: {plan.describe()}")
    noise = torch.randn(17, 4, arguments.side // 8, arguments.side // 8)
    words = Words().encode_from_tokens_scheduled("a painting")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        begin = time.perf_counter()
        comfy.sample.sample(
            model, noise, 10, 7.0, "euler", "normal", words, words, noise * 0, disable_pbar=True, seed=0
        )
        seconds = time.perf_counter() - begin
    print(f"core's KSampler, 17 frames in one batch, nothing of ours: {seconds:.2f} s, peak {memory()[1]:.0f} MiB")
    report = {"runs": rows, "core_seconds": seconds, "core_peak_mib": memory()[1], "planned_mib": plan.peak / MIB}
    (arguments.out / "comfyui_core.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
