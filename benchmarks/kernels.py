"""Each kernel against its peers on a GPU: numerics first, then medians of timed repeats; tables and kernels.json.

    PYTHONPATH=folder-with-a-link-named-comfyui_veostyle python benchmarks/kernels.py --out FOLDER [--only attention,norm]

Random data throughout, fp16. Kernels are timed by replaying a CUDA graph of them, ours and the peers' alike, so that what is
compared is the GPU's work.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from comfyui_veostyle.kernels import cross_frame_attention as attention
from comfyui_veostyle.kernels import fp8_linear, kv_int4, lora_slots, st_norm
from comfyui_veostyle.kernels.block_mask import choose_blocks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from triton.testing import do_bench, do_bench_cudagraph

SHAPES = {
    "SD 1.5 64x64": (8, 4096, 40),
    "SD 1.5 32x32": (8, 1024, 80),
    "SD 1.5 16x16": (8, 256, 160),
    "SDXL 64x64": (10, 4096, 64),
    "SDXL 32x32": (20, 1024, 64),
    "DiT 32x56": (12, 1792, 128),
}
FRAMES, SOURCES, STYLE = 16, 4, 256
MAPS = [
    (16, 320, 64, 64), (16, 640, 32, 32), (16, 1280, 16, 16), (16, 320, 128, 128), (4, 128, 512, 512),
    (1, 128, 512, 512), (1, 512, 64, 64), (2, 320, 64, 64), (2, 1280, 8, 8),
]  # fmt: skip
MIB = 1 << 20
FLEX_BLOCK = 128
compiled_flex = torch.compile(flex_attention, dynamic=False)
Row = dict[str, float | str]


def ceilings() -> dict[str, float]:
    """Measured in the same run: bytes a second of a copy, read and written, and TFLOP/s of a product."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.float16).normal_()
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode="median") / 1e9
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") / 1e9
    return {"copy TB/s": copy, "bf16 product TFLOP/s": product}


def inputs(heads: int, n: int, d: int) -> tuple:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, FRAMES, n, heads, d, device="cuda", dtype=torch.float16).transpose(2, 3) for _ in range(3)
    )
    this = torch.arange(FRAMES, device="cuda")
    table = torch.stack([torch.zeros_like(this), (this - 1).clamp(min=0), this, (this + 1).clamp(max=FRAMES - 1)], 1)
    style = (torch.randn(1, heads, STYLE, d, device="cuda", dtype=torch.float16) for _ in range(2))
    return q, k, v, table, *style


def error(out: torch.Tensor, given: tuple, kept: torch.Tensor | None = None) -> float:
    """Relative error of two frames against float64."""
    q, k, v, table, style_k, style_v = given
    exact = attention.reference(
        q[:, :2].double(), k.double(), v.double(), table[:2], style_k.double(), style_v.double(), kept=kept
    )
    return float((out[:, :2].double() - exact).norm() / exact.norm())


def timed(job: Callable) -> float:
    return do_bench(job, return_mode="median")


def replayed(job: Callable) -> float:
    return do_bench_cudagraph(job, return_mode="median")


def extra_memory(job: Callable) -> float:
    """MiB that a job takes beyond its result."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = job()
    return (torch.cuda.max_memory_allocated() - before - out.nbytes) / MIB


def flex(given: tuple) -> Callable:
    """PyTorch's FlexAttention over whole blocks of the frames listed; a frame listed twice counts once there."""
    q, k, v, table, style_k, style_v = given
    frames, n = q.shape[1], q.shape[3]
    a_frame = torch.arange(n // FLEX_BLOCK, device=q.device)
    style = frames * len(a_frame) + torch.arange(style_k.shape[2] // FLEX_BLOCK, device=q.device)
    every = frames * len(a_frame) + len(style)
    counts, rows = [], []
    for sources in table.tolist():
        blocks = torch.cat([*(s * len(a_frame) + a_frame for s in sorted(set(sources))), style])
        counts += [len(blocks)] * len(a_frame)
        rows += [F.pad(blocks, (0, every - len(blocks)))] * len(a_frame)
    counts, rows = torch.tensor(counts, device=q.device).int()[None, None], torch.stack(rows).int()[None, None]

    def listed(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (table[query // n] == key // n).any() | (key >= frames * n)

    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(rows), counts, rows, BLOCK_SIZE=FLEX_BLOCK, mask_mod=listed,
        seq_lengths=(frames * n, frames * n + style_k.shape[2]),
    )  # fmt: skip

    def joined(x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.transpose(1, 2).flatten(2, 3), style], 2)

    def run() -> torch.Tensor:
        query = q.transpose(1, 2).flatten(2, 3)
        out = compiled_flex(query, joined(k, style_k), joined(v, style_v), block_mask=mask)
        return out.unflatten(2, (frames, n)).transpose(1, 2)

    return run


def attentions() -> Iterator[Row]:
    """Four sources and 256 style tokens, read in place, against gathering and PyTorch's attentions, and FlexAttention."""
    for name, (heads, n, d) in SHAPES.items():
        given = inputs(heads, n, d)
        wrong = error(attention.cross_frame_attention(*given), given)
        peers = {}
        for peer, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                peers[peer] = replayed(lambda given=given: attention.reference(*given))
        ours = replayed(lambda given=given: attention.cross_frame_attention(*given))
        by_flex = flex(given)
        inner = slice(2, FRAMES - 1)  # the others list a frame twice
        unlike = float((by_flex() - attention.cross_frame_attention(*given))[:, inner].float().abs().max())
        if unlike > 1e-2:
            raise RuntimeError(f"FlexAttention differs by {unlike:.2g}: not the same job")
        operations = 4 * FRAMES * heads * n * (SOURCES * n + STYLE) * d
        yield {
            "shape": name,
            "ours ms": ours,
            **{f"gather + {p} ms": ms for p, ms in peers.items()},
            "FlexAttention ms": replayed(by_flex),
            "times faster": min(peers.values()) / ours,
            "TFLOP/s": operations / ours / 1e9,
            "error": wrong,
            "extra MiB": extra_memory(lambda given=given: attention.cross_frame_attention(*given)),
            "peer's extra MiB": extra_memory(lambda given=given: attention.reference(*given)),
        }


def additions() -> Iterator[Row]:
    """What AdaIN of queries and keys, weights, and nine tokens nearby cost; and AdaIN and gathering by PyTorch."""
    for name, (heads, n, d) in SHAPES.items():
        q, k, v, table, *style = inputs(heads, n, d)
        affines = tuple(torch.rand(*x.shape[:3], 3, d, device="cuda") + 0.5 for x in (q, k))
        around = torch.arange(n, device="cuda")[:, None] + torch.arange(-4, 5, device="cuda")
        nearby = torch.arange(FRAMES, device="cuda")[:, None, None] * n + around.clamp(0, n - 1)
        options = {
            "plain": {}, "AdaIN": {"affines": affines}, "nearby": {"nearby": nearby},
            "weights": {"weights": torch.rand(SOURCES + 1, device="cuda") + 0.5},
        }  # fmt: skip
        exact = attention.reference(
            *(x.double() for x in (q[:, :2], k, v)), table[:2], *(x.double() for x in style),
            affines=(affines[0][:, :2].double(), affines[1].double()),
        )  # fmt: skip
        got = attention.cross_frame_attention(q, k, v, table, *style, affines=affines)[:, :2]
        yield {
            "shape": name,
            **{
                f"{what} ms": replayed(lambda: attention.cross_frame_attention(q, k, v, table, *style, **more))  # noqa: B023
                for what, more in options.items()
            },
            "AdaIN by PyTorch ms": replayed(lambda: attention.reference(q, k, v, table, *style, affines=affines)),  # noqa: B023
            "error with AdaIN": float((got.double() - exact).norm() / exact.norm()),
        }


def sparse() -> Iterator[Row]:
    """Half the blocks, chosen among means, against all of them; on keys that resemble their neighbours."""
    for name, (heads, n, d) in SHAPES.items():
        q, k, v, *rest = inputs(heads, n, d)
        side = int(n**0.5)
        # Features of pictures vary slowly from token to token; noise has no blocks that matter.
        coarse = torch.randn(1, FRAMES, heads, max(1, n // 64), d, device="cuda", dtype=torch.float16)
        q = q + 2 * coarse.repeat_interleave(64, 3)[..., :n, :]
        k = k + 2 * coarse.repeat_interleave(64, 3)[..., :n, :]
        given = (q, k, v, *rest)
        kept = choose_blocks(q, k, rest[0], 0.5)
        whole = attention.cross_frame_attention(*given)
        half = attention.cross_frame_attention(*given, kept=kept)
        dense = replayed(lambda given=given: attention.cross_frame_attention(*given))
        ours = replayed(lambda given=given, kept=kept: attention.cross_frame_attention(*given, kept=kept))
        choosing = replayed(lambda q=q, k=k, t=rest[0]: choose_blocks(q, k, t, 0.5))
        yield {
            "shape": name, "tokens a side": side, "dense ms": dense, "half the blocks ms": ours, "choosing ms": choosing,
            "times faster": dense / ours, "with choosing": dense / (ours + choosing),
            "numeric error": error(half, given, kept[:, :2]),
            "change of the result": float((half - whole).float().norm() / whole.float().norm()),
        }  # fmt: skip


def four_bits() -> Iterator[Row]:
    """Attention over the frames and 4-bit style tokens, as many as a frame's, against the same at 16 bits."""
    for name, (heads, n, d) in SHAPES.items():
        q, k, v, table, _, _ = inputs(heads, n, d)
        style = torch.randn(2, 1, heads, n, d, device="cuda", dtype=torch.float16)
        packed = kv_int4.pack(*style)
        plain = replayed(lambda: attention.cross_frame_attention(q, k, v, table, *style))  # noqa: B023
        ours = replayed(lambda: attention.cross_frame_attention(q, k, v, table, *kv_int4.unpack(packed)))  # noqa: B023
        alone = [x[:, None] for x in style]
        exact = attention.reference(q[:, :1].double(), *(x.double() for x in alone), table[:1, :1] * 0)
        got = attention.cross_frame_attention(
            q[:, :1], *(x[:, None] for x in kv_int4.unpack(packed)), table[:1, :1] * 0
        )
        yield {
            "shape": name,
            "16 bits ms": plain,
            "4 bits ms": ours,
            "time": ours / plain,
            "bits an element": packed.nbytes * 8 / style.numel(),
            "error over 4-bit tokens alone": float((got.double() - exact).norm() / exact.norm()),
        }


def norms() -> Iterator[Row]:
    """Group norm + SiLU against eager and torch.compile, and three passes over memory at the copy's speed."""
    speed = ceilings()["copy TB/s"] * 1e9
    compiled = torch.compile(lambda h, w, b: F.silu(F.group_norm(h, 32, w, b, 1e-5)))
    for shape in MAPS:
        weight, bias = torch.randn(2, shape[1], device="cuda", dtype=torch.float16)
        for layout, form in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
            h = (torch.randn(shape, device="cuda") * 2 + 3).half().to(memory_format=form)
            exact = F.silu(F.group_norm(h[:1].double(), 32, weight.double(), bias.double(), 1e-5))
            out = st_norm.group_norm(h, 32, weight, bias, 1e-5, silu=True)
            ours = replayed(lambda: st_norm.group_norm(h, 32, weight, bias, 1e-5, silu=True))  # noqa: B023
            eager = replayed(lambda: F.silu(F.group_norm(h, 32, weight, bias, 1e-5)))  # noqa: B023
            by_compiler = replayed(lambda: compiled(h, weight, bias)) if layout == "NCHW" else float("nan")  # noqa: B023
            yield {
                "tensor": "x".join(map(str, shape)) + f" {layout}",
                "ours ms": ours,
                "eager ms": eager,
                "compiled ms": by_compiler,
                "times faster": eager / ours,
                "of 3 passes": ours / (3 * h.nbytes / speed),
                "error": float((out[:1].double() - exact).norm() / exact.norm()),
            }


def slots() -> Iterator[Row]:
    """Three adapters of rank 16 beside a linear layer, one of them at 0, against a bypass for each."""
    for rows, inputs_, outputs in (
        (34 * 4096, 320, 320),
        (34 * 1024, 640, 5120),
        (34 * 256, 1280, 1280),
        (2 * 4096, 320, 320),
    ):
        x, y = (torch.randn(rows, n, device="cuda", dtype=torch.float16) for n in (inputs_, outputs))
        down = torch.randn(48, inputs_, device="cuda", dtype=torch.float16) / inputs_**0.5
        up = torch.randn(outputs, 48, device="cuda", dtype=torch.float16)
        strengths = torch.tensor([1.0, 0.0, -0.5], device="cuda").repeat_interleave(16)

        def bypass(x=x, y=y, down=down, up=up) -> torch.Tensor:
            for strength, a, b in ((1.0, down[:16], up[:, :16]), (-0.5, down[32:], up[:, 32:])):
                y = y + strength * F.linear(F.linear(x, a), b)
            return y

        narrow = (x[:256].double() @ down.double().T) * strengths
        exact = y[:256].double() + narrow @ up.double().T
        out = lora_slots.lora_slots(y, x, down, up, strengths)
        ours = replayed(lambda: lora_slots.lora_slots(y, x, down, up, strengths))  # noqa: B023
        theirs = replayed(bypass)
        yield {
            "layer": f"{rows} x {inputs_} -> {outputs}",
            "ours ms": ours,
            "two bypasses ms": theirs,
            "times faster": theirs / ours,
            "error": float((out[:256].double() - exact).norm() / exact.norm()),
        }


def eight_bits() -> Iterator[Row]:
    """FP8 weights against half precision: time, bytes and error of one layer."""
    for rows, inputs_, outputs in (
        (34 * 4096, 320, 2560),
        (34 * 1024, 640, 5120),
        (34 * 256, 1280, 10240),
        (77, 768, 3072),
    ):
        x = torch.randn(rows, inputs_, device="cuda", dtype=torch.float16)
        weight = torch.randn(outputs, inputs_, device="cuda", dtype=torch.float16) / inputs_**0.5
        narrow = fp8_linear.quantise(weight)
        out, plain = fp8_linear.fp8_linear(x, *narrow), F.linear(x, weight)
        exact = x[:256].double() @ weight.double().T
        yield {
            "layer": f"{rows} x {inputs_} -> {outputs}",
            "FP8 ms": replayed(lambda: fp8_linear.fp8_linear(x, *narrow)),  # noqa: B023
            "fp16 ms": replayed(lambda: F.linear(x, weight)),  # noqa: B023
            "bytes of the weight": narrow[0].nbytes / weight.nbytes,
            "error of FP8": float((out[:256].double() - exact).norm() / exact.norm()),
            "error of fp16": float((plain[:256].double() - exact).norm() / exact.norm()),
        }


def networks() -> Iterator[Row]:
    """SD 1.5's UNet and autoencoder, random weights, 512x512: diffusers' as they are against ours, eager and replayed."""
    from comfyui_veostyle.veo_core.backbones.stable_diffusion.fused import fuse
    from comfyui_veostyle.veo_core.cuda_graphs import CAPTURE_AFTER, CudaGraphs

    make_parts = runpy.run_path(str(Path(__file__).with_name("stable_diffusion.py")))["make_parts"]

    def peak(job: Callable) -> float:
        job()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        job()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def row(name: str, count: int, call: Callable, *given: torch.Tensor) -> Row:
        with torch.no_grad():
            out = call(*given)
            eager, most = timed(lambda: call(*given)), peak(lambda: call(*given))
            graphs = CudaGraphs()
            for _ in range(CAPTURE_AFTER):
                graphs("a", call, *given)
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            graphs("a", call, *given)
            pool = (torch.cuda.memory_reserved() - reserved) / MIB
            by_graph = timed(lambda: graphs("a", call, *given))
        outputs.append(out.float())
        return {
            "what": name,
            "batch": count,
            "ms": eager,
            "ms by CUDA graph": by_graph,
            "peak MiB": most,
            "graph keeps MiB": pool,
        }

    theirs, ours = make_parts("cuda", False), make_parts("cuda", False)
    for model in (ours.unet, ours.vae):
        fuse(model)
    for count in (1, 2, 32):
        x, words = (
            torch.randn(count, *shape, device="cuda", dtype=torch.float16) for shape in ((4, 64, 64), (77, 768))
        )
        time, outputs = torch.tensor(500, device="cuda"), []
        for name, parts in (("UNet, diffusers", theirs), ("UNet, ours", ours)):
            found = row(name, count, lambda x, t, w, u=parts.unet: u(x, t, w, return_dict=False)[0], x, time, words)
            yield found | {"difference": float((outputs[-1] - outputs[0]).norm() / outputs[0].norm())}
    for count in (1, 4, 16):
        z, outputs = torch.randn(count, 4, 64, 64, device="cuda", dtype=torch.float16), []
        for name, parts in (("decode, diffusers", theirs), ("decode, ours", ours)):
            found = row(name, count, lambda z, v=parts.vae: v.decode(z, return_dict=False)[0], z)
            yield found | {"difference": float((outputs[-1] - outputs[0]).norm() / outputs[0].norm())}


SECTIONS = {
    "attention": attentions,
    "additions": additions,
    "sparse": sparse,
    "four bits": four_bits,
    "norm": norms,
    "slots": slots,
    "eight bits": eight_bits,
    "network": networks,
}


def main() -> None:
    # This folder's kernels.py would stand for Hugging Face's kernels, which diffusers may import.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="sections, separated by commas")
    arguments = parser.parse_args()
    wanted = [w.strip() for w in arguments.only.split(",") if w.strip()] or list(SECTIONS)
    found: dict[str, object] = {"chip": torch.cuda.get_device_name(), "torch": torch.__version__, **ceilings()}
    print(found, flush=True)
    for section in wanted:
        rows = []
        for row in SECTIONS[section]():
            if not rows:
                print(f"\n{section}\n| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(v if isinstance(v, str) else f"{v:.4g}" for v in row.values()) + " |", flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
        found[section] = rows
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kernels.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
