"""Run by a real ComfyUI's Python: tiny models of each family through the pack's nodes; prints what held as JSON.

COMFYUI_PATH=... VEOSTYLE_ROOT=... python comfy_models.py FOLDER
"""

import collections
import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path

core, root, work = os.environ["COMFYUI_PATH"], os.environ["VEOSTYLE_ROOT"], Path(sys.argv[1])
DEVICE = os.environ.get("VEOSTYLE_DEVICE", "cpu")
sys.argv = ["x", "--cpu"] if DEVICE == "cpu" else ["x"]
sys.path.insert(0, core)
os.chdir(core)
logging.disable(logging.INFO)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.sample  # noqa: E402
import torch  # noqa: E402
from comfy_tiny import ltxv, sd15, sdxl, variants, wan, wan22  # noqa: E402

(work / "packs").mkdir(exist_ok=True)
(work / "packs" / "comfyui_veostyle").symlink_to(root)
sys.path.insert(0, str(work / "packs"))
torch.set_grad_enabled(False)


def make_clip(path, frames, size):
    from fractions import Fraction

    from comfyui_veostyle.veo_core.video.codecs import OutputFormat
    from comfyui_veostyle.veo_core.video.writer import VideoWriter

    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 5, 9, generator=generator)
    scene = torch.nn.functional.interpolate(coarse, (size[1], size[0] + frames), mode="bicubic").clamp(0, 1)
    with VideoWriter(path, size, Fraction(24), output=OutputFormat("ffv1")) as writer:
        for i in range(frames):
            writer.write(scene[..., i : i + size[0]], [Fraction(i, 24)])


def main():
    import folder_paths

    folder_paths.set_output_directory(str(work / "output"))
    folder_paths.set_temp_directory(str(work / "temp"))
    nodes = importlib.import_module("comfyui_veostyle.nodes")
    from comfyui_veostyle.nodes import model as model_nodes
    from comfyui_veostyle.veo_core.options import parse_options
    from comfyui_veostyle.veo_core.style.encoder import style_from_tensors
    from comfyui_veostyle.veo_core.style.prompts import parse_prompts
    from comfyui_veostyle.veo_core.video.reader import open_clip

    del nodes
    from comfyui_veostyle.nodes.comfy_backbone import ComfyBackbone

    report = {}
    for name, make in (("sd15", sd15), ("sdxl", sdxl), ("wan", wan), ("wan22", wan22), ("ltxv", ltxv)):
        begin = time.time()
        model, vae, clip = make()
        frames, size = (19, (96, 64)) if name != "ltxv" else (27, (96, 64))
        make_clip(work / f"{name}.mkv", frames, size)
        video = open_clip(work / f"{name}.mkv")
        words = style_from_tensors([], prompts=parse_prompts("a red house\n@0 at night\n@9 at dawn", "blurry"))
        one_prompt = style_from_tensors([], prompts=parse_prompts("a red house", "blurry"))
        picture = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))
        pictures = style_from_tensors([picture], prompts=parse_prompts("a red house", "blurry"))
        window = {"window": 8, "overlap": 2} if name in ("sd15", "sdxl") else {"window": 17, "overlap": 8}
        held = {}

        def engine_of(model):
            return model_nodes.loaded(ComfyBackbone(model, vae, clip, "euler", "normal", name)).engine  # noqa: B023

        def run(model, style, folder, **options):
            options = parse_options(steps=4, guidance=3.0, **{"denoise": 0.5, **window, **options})  # noqa: B023
            engine = engine_of(model)
            plan = engine.plan(video, options)  # noqa: B023
            latents = engine.denoise(video, style, options, work / folder, plan)  # noqa: B023
            samples = latents.samples.clone()
            decoded = torch.cat(list(engine.decode(latents)))
            latents.store.remove()
            return samples, decoded

        base, pixels = run(model, one_prompt, f"{name}-base", strength=0.0, window=max(frames, 2), overlap=0)
        held["frames"] = list(pixels.shape) == [frames, 3, size[1], size[0]]
        held["finite"] = bool(pixels.isfinite().all() and base.isfinite().all())
        held["plain is core's"] = plain_is_core_s(engine_of(model), video, one_prompt, base, name, frames)
        styled, decoded = run(model, pictures, f"{name}-styled")
        held["styled differs"] = bool((styled - base).abs().max() > 1e-3 and decoded.isfinite().all())
        again, _ = run(model, pictures, f"{name}-again")
        held["same again"] = bool(torch.equal(styled, again))
        timeline, _ = run(model, words, f"{name}-timeline")
        held["timeline differs"] = bool((timeline - styled).abs().max() > 1e-3)
        held["plain unharmed"] = bool(
            torch.equal(
                run(model, one_prompt, f"{name}-base2", strength=0.0, window=max(frames, 2), overlap=0)[0], base
            )
        )
        lora = with_lora(model)
        held["lora"] = bool(
            (run(lora, pictures, f"{name}-lora")[0] - styled).abs().max() > 1e-4
            and torch.equal(run(model, pictures, f"{name}-lora2")[0], styled)
        )
        other = model.clone()
        calls = collections.Counter()

        def theirs(func, *args, **kwargs):
            calls["override"] += 1  # noqa: B023
            return func(*args, **kwargs)

        other.model_options["transformer_options"]["optimized_attention_override"] = theirs
        chained, _ = run(other, pictures, f"{name}-chained")
        held["their override is called"] = calls["override"] > 0
        held["their override changes nothing"] = bool(torch.equal(chained, styled))
        held["split branches agree"] = split(run, model, pictures, styled, name)
        if name in ("sd15", "sdxl"):
            held["attention over frames agrees"] = across_frames(run, model, pictures, styled, name)
            held["motion is followed"] = follows_motion(run, model, other, pictures, name)
        if name in ("sd15", "wan"):
            held["stochastic windows meet"] = stochastic(model, vae, clip, video, one_prompt, window, frames, name)
        report[name] = held
        print(name, f"{time.time() - begin:.1f} s", held, file=sys.stderr)
    report["errors"] = errors()
    print("REPORT " + json.dumps(report))


def across_frames(run, model, style, gathered, name):
    """Where a kernel takes the tensors, frames are read in place: the same result but for rounding."""
    from comfyui_veostyle.nodes import comfy_backbone

    taken, takes = [], comfy_backbone.takes
    comfy_backbone.takes = lambda *tensors: taken.append(tensors[0].shape) or True
    try:
        in_place, _ = run(model, style, f"{name}-in-place")
    finally:
        comfy_backbone.takes = takes
    change = float((in_place - gathered).abs().max() / gathered.abs().max())
    return (change < 1e-3 and len(taken) > 0) or [change, len(taken)]


def follows_motion(run, model, other, style, name):
    """Tokens along the motion change the result; beside another pack's attention they are refused."""
    from comfyui_veostyle.veo_core.errors import InputError

    knobs = "sources=self+warped+anchor"
    followed, decoded = run(model, style, f"{name}-warped", knobs=knobs)
    still, _ = run(model, style, f"{name}-still", knobs="sources=self+anchor")
    try:
        run(other, style, f"{name}-refused", knobs=knobs)
        told = "nothing"
    except InputError as e:
        told = str(e)
    change = float((followed - still).abs().max())
    return bool(change > 1e-4 and decoded.isfinite().all() and "sources = warped" in told) or [change, told]


def split(run, model, style, together, name):
    """Short of memory core runs guidance's branches one after the other: the same result but for rounding."""
    batches = []

    def low(*place, torch_free_too=False):
        # Attention asks too, and is to go on as before.
        return (1 << 34, 1 << 34) if torch_free_too or True in place else 1.0

    kept = comfy.model_management.get_free_memory, getattr(type(model), "get_free_memory", None)
    other = model.clone()
    other.add_wrapper_with_key("diffusion_model", "count", lambda go, *a, **k: batches.append(len(a[0])) or go(*a, **k))
    try:
        comfy.model_management.get_free_memory = low
        if kept[1]:
            type(model).get_free_memory = low
        apart, _ = run(other, style, f"{name}-split")
    finally:
        comfy.model_management.get_free_memory = kept[0]
        if kept[1]:
            type(model).get_free_memory = kept[1]
    change = float((apart - together).abs().max() / together.abs().max())
    whole = 2 if name in ("wan", "wan22", "ltxv") else 18
    return (change < 1e-2 and max(batches) < whole) or [change, batches[:6]]


def stochastic(model, vae, clip, video, style, window, frames, name):
    """With a sampler that adds noise, a window's frames get the same noise as in one long window."""
    from comfyui_veostyle.nodes import model as model_nodes
    from comfyui_veostyle.nodes.comfy_backbone import ComfyBackbone
    from comfyui_veostyle.veo_core.options import parse_options
    from comfyui_veostyle.veo_core.sampling.noise import frame_generator

    backbone = ComfyBackbone(model, vae, clip, "euler_ancestral", "normal", name)
    engine = model_nodes.loaded(backbone).engine
    if name == "wan":
        # Frames of a video depend on each other; that our noise is drawn is what can be seen.
        import comfyui_veostyle.veo_core.sampling.sampler as sampler

        drawn = []
        sampler.frame_generator = lambda *key: drawn.append(key) or frame_generator(*key)
        try:
            options = parse_options(steps=4, guidance=3.0, denoise=0.5, strength=0.0, **window)
            engine.denoise(video, style, options, work / "stochastic").store.remove()
        finally:
            sampler.frame_generator = frame_generator
        return len(drawn) > 0
    results = []
    for size, overlap in ((frames, 0), (8, 2)):
        options = parse_options(steps=4, guidance=3.0, denoise=0.5, strength=0.0, window=size, overlap=overlap)
        latents = engine.denoise(video, style, options, work / "stochastic")
        results.append(latents.samples.clone())
        latents.store.remove()
    return bool((results[0] - results[1]).abs().max() < 1e-2 * results[0].abs().max()) or float(
        (results[0] - results[1]).abs().max()
    )


def plain_is_core_s(engine, video, style, base, name, frames):
    """With strength 0, what core's own sampler gives for the same noise and latents."""
    from comfyui_veostyle.veo_core.options import parse_options
    from comfyui_veostyle.veo_core.sampling.noise import frame_noise
    from comfyui_veostyle.veo_core.video.scenes import survey

    backbone = engine.backbone
    seen = survey(video)
    images = torch.stack([f.image for f in video.frames()])
    missing = -(frames - 1) % backbone.time_factor
    images = torch.nn.functional.pad(
        images, (0, -images.shape[-1] % backbone.multiple, 0, -images.shape[-2] % backbone.multiple), mode="replicate"
    )
    images = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
    content = backbone.encode(images.to(backbone.device)).cpu()
    places = [0] + [1 + (i - 1) * backbone.time_factor for i in range(1, len(content))]
    noise = torch.cat([frame_noise(0, range(f, f + 1), tuple(content.shape[1:])) for f in places])
    # For images the anchor, which is the first frame here, stands before them in the batch.
    if not backbone.is_video:
        content, noise = torch.cat([content[:1], content]), torch.cat([noise[:1], noise])
    condition = backbone.condition(style, parse_options(), seen)
    shaped = (lambda x: x.movedim(0, 1)[None]) if backbone.is_video else (lambda x: x)
    out = comfy.sample.sample(
        backbone.model, shaped(noise), 4, 3.0, "euler", "normal", condition.encoded["a red house"],
        condition.encoded["blurry"], shaped(content), start_step=2, disable_pbar=True, seed=0,
    )  # fmt: skip
    out = out[0].movedim(0, 1) if backbone.is_video else out[1:]
    return bool(torch.equal(out.float(), base)) or float((out.float() - base).abs().max())


def with_lora(model):
    import comfy.weight_adapter

    keys = [k for k in model.model.state_dict() if k.endswith(("attn1.to_q.weight", "self_attn.q.weight"))]
    patches = {}
    for key in keys:
        weight = model.model.state_dict()[key]
        generator = torch.Generator().manual_seed(4)
        up = torch.randn(weight.shape[0], 4, generator=generator)
        down = torch.randn(4, weight.shape[1], generator=generator)
        patches[key] = comfy.weight_adapter.LoRAAdapter(set(), (up, down, 4.0, None, None, None))
    patched = model.clone()
    assert patched.add_patches(patches, 0.5)
    return patched


def errors():
    """What must be refused, and with which words."""
    from comfyui_veostyle.nodes.comfy_backbone import ComfyBackbone
    from comfyui_veostyle.veo_core.errors import VeoError

    told = []
    model, vae, clip = sd15()
    wrong_vae = wan()[1]
    strange = sd15()[0]
    strange.model.model_config = type("Flux", (), {})()
    for arguments in ((model, wrong_vae, clip), (strange, vae, clip)):
        try:
            ComfyBackbone(*arguments, "euler", "normal", "x")
            told.append("")
        except VeoError as e:
            told.append(str(e))
    for name, refused in variants().items():
        try:
            ComfyBackbone(refused, vae, clip, "euler", "normal", "x")
            told.append(f"{name} is taken")
        except VeoError as e:
            told.append(str(e))
    return told


main()
