"""Stable Diffusion: the plain model bit for bit, windows, coherence, files."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext

import pytest
import torch
from comfyui_veostyle.kernels.cross_frame_attention import cross_frame_attention
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.layers.cross_frame_attention import source_table
from comfyui_veostyle.veo_core.layers.st_norm import TemporalContext
from comfyui_veostyle.veo_core.layers.style_session import Site, StyleSession
from comfyui_veostyle.veo_core.memory.plan import StagePeaks
from comfyui_veostyle.veo_core.motion.flow import FlowNet
from comfyui_veostyle.veo_core.options import StylizeOptions, parse_options
from comfyui_veostyle.veo_core.sampling.sampler import WindowJob, WindowState
from comfyui_veostyle.veo_core.sampling.windows import windows_of
from comfyui_veostyle.veo_core.style.encoder import Style
from comfyui_veostyle.veo_core.style.prompts import parse_prompts
from comfyui_veostyle.veo_core.video.scenes import Scene, Survey

from . import tiny


def survey_of(frames):
    times = tuple(torch.arange(frames).tolist())
    return Survey(times, frames, (Scene(0, frames, 0),))


def words(text="a red house", negative="blurry"):
    return Style((), (), prompts=parse_prompts(text, negative))


def picture(seed=0):
    return torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(seed))


def run(model, style, frames, options=None, window=None, overlap=0, content=None, watch=None, motion=None):
    """All windows of a scene, as the engine does them: ``[frames, 4, h, w]``."""
    options = (options or StylizeOptions()).model_copy(update={"window": window or frames, "overlap": overlap})
    options = options.for_backbone(model.defaults, model.reads)
    content = moving(frames) if content is None else content
    condition = model.condition(style, options, survey_of(frames))
    state, out = WindowState(), []
    for w in windows_of((Scene(0, frames, 0),), options.window, overlap):
        job = WindowJob(
            w, 0, [0, *range(w.start, w.end)], torch.cat([content[:1], content[w.start : w.end]]), motion,
            options.window - overlap, options, state, watch or (lambda step: None),
        )  # fmt: skip
        latents = model.sample(condition, job)[1:]
        state = job.left()
        out.append(latents[: len(latents) - state.overlap])
    return torch.cat(out)


def moving(frames, size=8, seed=0):
    """Latents that slide by a little each frame."""
    generator = torch.Generator().manual_seed(seed)
    field = torch.nn.functional.interpolate(
        torch.randn(1, 4, 4, 8, generator=generator), (size, size * 4), mode="bicubic"
    )[0]
    return torch.stack([field[:, :, i // 2 : i // 2 + size] for i in range(frames)])


@pytest.fixture(scope="module", params=["sd15", "sdxl"])
def model(request):
    return tiny.backbone(request.param)


def plain_diffusers(model, options, style, content, monkeypatch):
    """diffusers' own image-to-image pipeline on the same latents, noise and embeddings."""
    import diffusers
    from comfyui_veostyle.veo_core.sampling.noise import frame_noise
    from comfyui_veostyle.veo_core.sampling.schedule import make_scheduler

    frames = len(content)
    embeddings = model.condition(style, options, survey_of(frames - 1)).embeddings
    noise = torch.cat([frame_noise(options.seed, range(f, f + 1), (4, 8, 8)) for f in (0, *range(frames - 1))])
    noise = noise.to(content)
    scheduler = make_scheduler(model.schedule_config, model.sampler, model.scheduler)
    common = {"vae": model.vae, "unet": model.unet, "scheduler": scheduler, "text_encoder": None, "tokenizer": None}
    if model.text.skip:
        pipeline = diffusers.StableDiffusionXLImg2ImgPipeline(**common, text_encoder_2=None, tokenizer_2=None)
    else:
        pipeline = diffusers.StableDiffusionImg2ImgPipeline(
            **common, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    module = __import__(type(pipeline).__module__, fromlist=["randn_tensor"])
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: noise)
    pipeline.set_progress_bar_config(disable=True)
    positive, negative = (embeddings[text, ()] for text in (style.prompts.text, style.prompts.negative))
    extra = {}
    if positive.pooled is not None:
        extra = {
            "pooled_prompt_embeds": positive.pooled.expand(frames, -1),
            "negative_pooled_prompt_embeds": negative.pooled.expand(frames, -1),
            "original_size": (64, 64),
            "target_size": (64, 64),
        }
    return pipeline(
        image=content, strength=options.denoise, num_inference_steps=options.steps, guidance_scale=options.guidance,
        prompt_embeds=positive.tokens.expand(frames, -1, -1),
        negative_prompt_embeds=negative.tokens.expand(frames, -1, -1), output_type="latent", **extra,
    ).images  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [
        ("ddim", "normal"),
        ("dpmpp_2m", "karras"),
        ("euler", "normal"),
        ("heun", "normal"),
        ("uni_pc", "normal"),
    ],
)
def test_strength_0_is_plain_diffusers_bit_for_bit(model, sampler, scheduler, monkeypatch):
    monkeypatch.setattr(model, "sampler", sampler)
    monkeypatch.setattr(model, "scheduler", scheduler)
    options = StylizeOptions(strength=0, steps=6, guidance=5.0, denoise=0.6, seed=3).for_backbone(
        model.defaults, model.reads
    )
    content = moving(4)
    style = Style((picture(),), (1.0,), prompts=words().prompts)
    ours = run(model, style, 4, options, content=content)
    theirs = plain_diffusers(model, options, style, torch.cat([content[:1], content]), monkeypatch)
    assert torch.equal(ours, theirs[1:])
    assert not torch.equal(ours, content)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(
    "sampler", ["ddim", "dpmpp_2m", "euler", "euler_ancestral", "heun", "uni_pc", "lcm", "dpmpp_2m_sde"]
)
def test_two_windows_are_one_long_one_where_frames_are_apart(sampler, prediction):
    model = tiny.backbone(sampler=sampler, prediction_type=prediction)
    injection = StylizeOptions().injection.model_copy(update={"sources": ("self",), "norm": 0.0, "latent_norm": 0.0})
    options = StylizeOptions(steps=4, injection=injection, denoise=1.0)
    style = Style((picture(),), (1.0,), prompts=words().prompts)
    # In double precision: a random model makes much of rounding.
    model.unet.double()
    one, two = (
        run(model, style, 8, options, window=w, overlap=o, content=moving(8).double()) for w, o in ((8, 0), (5, 2))
    )
    assert (one - two).abs().max() < 1e-6
    assert one.isfinite().all()


def test_a_window_s_border_is_no_larger_a_jump_than_neighbours_inside(model):
    style = Style((picture(),), (1.0,), prompts=words().prompts)
    latents = run(model, style, 22, StylizeOptions(steps=6), window=8, overlap=3)
    jumps = (latents[1:] - latents[:-1]).square().mean((1, 2, 3))
    borders = [4, 9, 14, 19]  # a window's first frame of its own, less one
    inside = [i for i in range(len(jumps)) if i not in borders]
    assert jumps[borders].mean() <= 1.1 * jumps[inside].mean()


def test_cross_frame_attention_with_one_source_is_plain_attention():
    knobs = StylizeOptions().injection.model_copy(update={"sources": ("self",), "attention": 0.0})
    q, k, v = torch.randn(3, 12, 4, 9, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    session = StyleSession(knobs)
    with session.apply(0.5, TemporalContext(6)):
        assert torch.equal(session.attend(Site("a", 0.5), q, k, v, attend), attend(q, k, v))
    session = StyleSession(knobs.model_copy(update={"sources": ("self", "previous", "anchor", "next")}))
    with session.apply(0.5, TemporalContext(6)):
        mixed = session.attend(Site("a", 0.5), q, k, v, attend)
    assert torch.allclose(mixed[[0, 6]], attend(q, k, v)[[0, 6]], atol=1e-6)  # anchors read only themselves
    one = torch.cat([k[3], k[2], k[0], k[4]], 1), torch.cat([v[3], v[2], v[0], v[4]], 1)
    assert torch.allclose(mixed[3], attend(q[3], *one), atol=1e-6)


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun"])
def test_what_a_window_leaves_of_st_norm_the_next_takes_up(sampler):
    model, style = tiny.backbone(sampler=sampler), words()
    options = StylizeOptions(steps=4, window=4, overlap=1).for_backbone(model.defaults, model.reads)
    content, condition = moving(8), model.condition(style, options, survey_of(8))
    first, second = windows_of((Scene(0, 8, 0),), 4, 1)[:2]

    def denoised(w, state):
        frames = torch.cat([content[:1], content[w.start : w.end]])
        job = WindowJob(w, 0, [0, *range(w.start, w.end)], frames, None, 3, options, state, lambda step: None)
        return model.sample(condition, job)[1:], job.left()

    _, left = denoised(first, WindowState())
    assert any("latent" in key for key in left.moments)
    assert any("up_blocks" in key for key in left.moments)
    # Nothing is kept beside them, and the plan counts them.
    assert all(m.untyped_storage().nbytes() == m.nbytes for m in left.moments.values())
    ours = sum(m.nbytes for key, m in left.moments.items() if "latent" not in key)
    assert StagePeaks(model, FlowNet(), (64, 64), options).handed == 2 * (left.shared.nbytes + ours) > 0
    taken, _ = denoised(second, left)
    forgotten, _ = denoised(second, WindowState(left.shared))
    assert not torch.equal(taken, forgotten)


def brute_force(q, k, v, table, nearby, frame):
    """One frame's queries, each over the tokens listed for it."""
    keys, values = (torch.cat([x[i] for i in table[frame]], 1) for x in (k, v))
    flat_k, flat_v = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
    out = []
    for n, tokens in enumerate(nearby[frame]):
        tokens = tokens[tokens >= 0]
        own = torch.cat([keys, flat_k[:, tokens]], 1), torch.cat([values, flat_v[:, tokens]], 1)
        out.append(torch.nn.functional.scaled_dot_product_attention(q[frame][:, n : n + 1], *own))
    return torch.cat(out, 1)


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (6, 8), (5, 7)])
def test_warped_reads_where_each_place_was_in_the_frame_before(size, halved):
    """At the motion's own size and at half of it, rounded up; where it was hidden nothing is added."""
    flow = 2.0, -2.55
    motion = torch.zeros(5, 3, *size)
    motion[:, 0], motion[:, 1], motion[:, 2, :, 2:] = *flow, 1.0
    h, w = (-(-s // 2) if halved else s for s in size)
    seen = torch.nn.functional.interpolate(motion[:1, 2:], (h, w), mode="area")[0, 0] > 0.5
    knobs = StylizeOptions().injection.model_copy(update={"sources": ("self", "warped", "anchor"), "attention": 0.0})
    session = StyleSession(knobs)
    q, k, v = torch.randn(3, 10, 2, h * w, 8).double()
    with session.apply(0.5, TemporalContext(5, motion=motion)):
        out = session.attend(Site("a", 0.5), q, k, v, torch.nn.functional.scaled_dot_product_attention)
    nearby = torch.full((5, h * w, 9), -1)
    for t, y, x in itertools.product(range(2, 5), range(h), range(w)):
        cx, cy = round(x + flow[0] * w / size[1]), round(y + flow[1] * h / size[0])
        around = [(cx + i, cy + j) for j in (-1, 0, 1) for i in (-1, 0, 1)]
        if seen[y, x]:
            nearby[t, y * w + x] = torch.tensor(
                [(t - 1) * h * w + b * w + a if 0 <= a < w and 0 <= b < h else -1 for a, b in around]
            )
    assert (nearby >= 0).any()
    table = source_table(5, None, ("self", "anchor"))
    for frame in range(5):
        wanted = brute_force(q[5:], k[5:], v[5:], table, nearby, frame)
        torch.testing.assert_close(out[5 + frame], wanted)


@pytest.mark.parametrize(("count", "keys"), [(10, 10), (24, 24), (16, 64)])
def test_warped_refuses_tokens_that_are_no_halving_of_the_latents(count, keys):
    """As where another node resizes the features, or merges the queries."""
    session = StyleSession(StylizeOptions().injection.model_copy(update={"sources": ("self", "warped")}))
    q, k = torch.randn(3, 2, count, 8), torch.randn(3, 2, keys, 8)
    with (
        session.apply(0.5, TemporalContext(3, motion=torch.zeros(3, 3, 8, 8))),
        pytest.raises(InputError, match=f"sources = warped finds {count} queries and {keys} keys"),
    ):
        session.attend(Site("a", 0.5), q, k, k, torch.nn.functional.scaled_dot_product_attention)


@pytest.mark.parametrize(("sources", "styled", "refused"), [("self+anchor", 0, 1), ("self", 1, 1), ("self", 0, 0)])
def test_pictures_cut_into_tiles_are_refused_where_frames_or_styles_are_read(sources, styled, refused):
    """As another node of core does: a tile is no frame."""
    session = StyleSession(StylizeOptions().injection.model_copy(update={"sources": tuple(sources.split("+"))}))
    q = torch.randn(2 * 3 * 4, 2, 9, 8)
    if styled:
        session.shares, session.style_features = [1.0], ({"a": (q[:1], q[:1], q[:1])}, {})
    told = pytest.raises(InputError, match="24 pictures for 3 frames in 2 branches") if refused else nullcontext()
    with session.apply(0.5, TemporalContext(3, branches=("0", "1"))), told:
        out = session.attend(Site("a", 0.9), q, q, q, torch.nn.functional.scaled_dot_product_attention)
        assert out.shape == q.shape


@pytest.mark.parametrize("adain", ["none", "query_key", "key_value"])
def test_attention_across_frames_is_what_gathering_gives(adain):
    knobs = StylizeOptions().injection.model_copy(update={"adain": adain})
    q, k, v = torch.randn(3, 6, 2, 9, 8).double()
    outs = []
    for across in (None, cross_frame_attention):
        session = StyleSession(knobs)
        site, attend = Site("a", 0.9), torch.nn.functional.scaled_dot_product_attention
        with session.record_style([0.4, 0.6]):
            session.attend(
                site, *torch.randn(3, 2, 2, 9, 8, generator=torch.Generator().manual_seed(0)).double(), attend
            )
        with session.apply(0.5, TemporalContext(3)):
            outs.append(session.attend(site, q, k, v, attend, across))
    torch.testing.assert_close(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("adain", ["query_key", "key_value"])
def test_what_the_kernels_do_for_a_session_is_what_plain_attention_does(adain):
    knobs = {"adain": adain, "sources": ("self", "warped", "anchor")}
    injection = StylizeOptions().injection.model_copy(update=knobs)
    given = torch.randn(6, 6, 8, 256, 40) * 1.5 + 0.5
    motion = torch.rand(3, 3, 16, 16) * torch.tensor([3.0, 3.0, 1.0]).view(3, 1, 1)
    site, attend = Site("a", 0.9), torch.nn.functional.scaled_dot_product_attention
    outs = []
    for change, across in ((lambda x: x.double(), None), (lambda x: x.cuda().half(), cross_frame_attention)):
        q, k, v, *style = map(change, given)
        session = StyleSession(injection)
        with session.record_style([1.0]):
            session.attend(site, *(x[:1] for x in style), attend)
        with session.apply(0.5, TemporalContext(3, motion=change(motion).float())):
            outs.append(session.attend(site, q, k, v, attend, across).cpu().double())
    assert (outs[1] - outs[0]).norm() / outs[0].norm() < 2e-3


def test_following_the_motion_changes_the_picture(model):
    injection = StylizeOptions().injection
    motion = torch.zeros(5, 3, 8, 8)
    motion[:, 0], motion[:, 2] = 1.0, 1.0
    seen = [
        run(
            model, words(), 4, motion=motion,
            options=StylizeOptions(steps=3, injection=injection.model_copy(update={"sources": ("self", *more)})),
        )
        for more in ((), ("warped",), ("previous",), ("warped", "anchor"))
    ]  # fmt: skip
    for i, a in enumerate(seen):
        assert a.isfinite().all()
        for b in seen[:i]:
            assert (a - b).abs().max() > 1e-5


@pytest.mark.parametrize("adain", ["none", "query_key", "key_value"])
def test_every_knob_changes_the_picture(adain):
    model = tiny.backbone()
    style = Style((picture(), picture(1)), (0.7, 0.3), prompts=words("").prompts)
    base = StylizeOptions().injection.model_copy(update={"adain": adain})
    seen = [run(model, style, 3, StylizeOptions(steps=4, injection=base))]
    changes = {
        "attention": 0.4, "query": 0.0, "temperature": 1.0, "layers": (0.0, 0.3), "steps": (0.0, 0.4), "norm": 0.9,
        "latent_norm": 0.1, "start_adain": 0.1, "inversion": True, "denoise": 0.9, "sources": ("self", "next"),
    }  # fmt: skip
    if adain == "key_value":
        changes["blend"] = (0.8, 0.8)
    for name, value in changes.items():
        seen.append(run(model, style, 3, StylizeOptions(steps=4, injection=base.model_copy(update={name: value}))))
        assert seen[-1].isfinite().all(), name
    for i, a in enumerate(seen):
        for j in range(i):
            assert (a - seen[j]).abs().max() > 1e-4, (i, j)


def test_inversion_leads_back_to_where_it_came_from():
    """With the same prompt and nothing else, deterministic steps from the inverted latents give the source."""
    from comfyui_veostyle.veo_core.sampling.inversion import invert

    levels = [((1 - s**2) ** 0.5, s) for s in torch.linspace(0.7, 0.02, 200).tolist()]
    clean = torch.randn(2, 4, 8, 8)
    target = torch.randn(1, 4, 8, 8)
    noise_of = lambda x, i: 0.3 * target + 0.1 * x  # noqa: E731
    trail = invert(clean, levels, noise_of)
    x = trail[0]
    for i, (a, s) in enumerate(levels):
        e = noise_of(x, i)
        x0 = (x - s * e) / a
        b, r = levels[i + 1] if i + 1 < len(levels) else (1.0, 0.0)
        x = b * x0 + r * e
    assert (x - clean).abs().max() < 0.02
    assert (trail[0] - clean).abs().max() > 0.2


def test_nothing_is_left_in_the_model_between_runs():
    """Two runs with different styles, an interrupted one between them: the same as from a fresh model."""
    style, other = (Style((picture(s),), (1.0,), prompts=words().prompts) for s in (0, 1))
    model = tiny.backbone()
    before = {n: type(m) for n, m in model.unet.named_modules()}, dict(model.unet.attn_processors)
    first = run(model, style, 3, StylizeOptions(steps=6))
    run(model, other, 4, StylizeOptions(steps=6))

    def interrupt(step):
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, other, 3, StylizeOptions(steps=6), watch=interrupt)
    assert ({n: type(m) for n, m in model.unet.named_modules()}, dict(model.unet.attn_processors)) == before
    assert not any(m._forward_hooks for m in model.unet.modules())
    assert torch.equal(run(model, style, 3, StylizeOptions(steps=6)), first)
    assert torch.equal(run(tiny.backbone(), style, 3, StylizeOptions(steps=6)), first)


def test_prompts_change_along_the_clip():
    model = tiny.backbone()
    plain = StylizeOptions(strength=0, steps=3, guidance=4.0)
    timeline = Style((), (), prompts=parse_prompts("a house\n@0 red\n@6 blue"))
    mixed = run(model, timeline, 7, plain)
    red, blue = (run(model, words(f"a house, {w}", ""), 7, plain) for w in ("red", "blue"))
    assert torch.allclose(mixed[0], red[0], atol=1e-4)
    assert torch.allclose(mixed[6], blue[6], atol=1e-4)
    assert not torch.allclose(mixed[3], red[3], atol=1e-4)
    weighted = run(model, words("a (house:1.4)", ""), 1, plain)
    assert not torch.allclose(weighted, run(model, words("a house", ""), 1, plain), atol=1e-4)
    long = run(model, words(" ".join(["house"] * 200), ""), 1, plain)
    assert long.isfinite().all()


@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_single_file_and_folder_give_the_same_model(architecture, tmp_path):
    from comfyui_veostyle.veo_core.backbones import load_backbone

    made = tiny.parts(architecture)
    device = torch.device("cpu")
    from_file = load_backbone(
        tiny.save_checkpoint(made, tmp_path / "a.safetensors"), device, sampler="ddim", scheduler="normal"
    )
    from_folder = load_backbone(tiny.save_folder(made, tmp_path / "b"), device, sampler="ddim", scheduler="normal")
    for loaded in (from_file, from_folder):
        assert loaded.name == {"sd15": "SD 1.5", "sdxl": "SDXL"}[architecture]
        for ours, theirs in ((loaded.unet, made.unet), (loaded.vae, made.vae)):
            state = theirs.state_dict()
            assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in state.items()}
            assert all(torch.equal(v, state[k]) for k, v in ours.state_dict().items())
        for ours, theirs in zip(loaded.text.models, made.text, strict=True):
            state = theirs.state_dict()
            assert all(torch.equal(v, state[k]) for k, v in ours.state_dict().items())
    assert from_file.digest != from_folder.digest
    frames = torch.rand(2, 3, 64, 64)
    assert from_file.decode(from_file.encode(frames)).shape == frames.shape
    marked = tiny.ldm_checkpoint(made) | {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    from safetensors.torch import save_file

    save_file(marked, tmp_path / "v.safetensors")
    v = load_backbone(tmp_path / "v.safetensors", device)
    assert v.schedule_config["prediction_type"] == "v_prediction"


def test_tokens_are_those_of_clip(tmp_path):
    """open_clip's tokeniser and transformers' CLIPTokenizer, built from the same merges, agree."""
    from comfyui_veostyle.veo_core.backbones.stable_diffusion.text import tokenise

    ids, weights = tokenise("a photo of a cat", 49407)
    assert ids[0, :7].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert set(ids[0, 7:].tolist()) == {49407}
    ids, weights = tokenise("a photo of a (cat:1.3)", 0)
    assert weights[0, 5] == pytest.approx(1.3)
    assert weights[0, [0, 1, 4, 6]].tolist() == [1, 1, 1, 1]
    assert tokenise("cat " * 80, 0)[0].shape == (2, 77)


def test_a_checkpoint_stylises_a_video(tmp_path):
    """The whole engine on a tiny SD 1.5: cuts, windows, plan, resume, decode."""
    from comfyui_veostyle.veo_core.engine import Stylizer
    from comfyui_veostyle.veo_core.motion.flow import load_flow
    from comfyui_veostyle.veo_core.video.reader import open_clip

    from .conftest import make_pictures, make_video

    model = tiny.backbone()
    engine = Stylizer(model, load_flow(torch.device("cpu")))
    shots = make_pictures(14, (64, 64), 1), make_pictures(14, (64, 64), 2)
    clip = open_clip(
        make_video(tmp_path / "a.mkv", 14, size=(64, 64), codec="ffv1", picture=lambda i, w, h: shots[i >= 9](i, w, h))
    )
    options = parse_options(preset="strong", steps=3, guidance=3.0, window=6, overlap=2)
    style = Style((picture(),), (1.0,), prompts=parse_prompts("a house\n@scene 2 at night", "blurry"))
    plan = engine.plan(clip, options)
    assert plan.stages["denoise"] > 0
    latents = engine.denoise(clip, style, options, tmp_path / "w", plan)
    assert [s.start for s in latents.survey.scenes] == [0, 9]
    whole = latents.samples.clone()
    frames = torch.cat(list(engine.decode(latents)))
    latents.store.close()
    assert frames.shape == (14, 3, 64, 64)
    steps = []

    def monitor(progress):
        steps.append(progress)
        if progress.stage == "denoise" and progress.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.denoise(clip, style, options, tmp_path / "again", plan, monitor)
    resumed = engine.denoise(clip, style, options, tmp_path / "again", plan)
    assert resumed.store.resumed
    assert torch.equal(resumed.samples, whole)
    resumed.store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_in_half_precision_on_a_gpu(architecture, monkeypatch, tmp_path):
    """Plain steps as diffusers', style and coherence finite, a LoRA gone without a trace."""
    from .test_lora import kohya_file

    model = tiny.backbone(architecture)
    model.module.to("cuda", torch.float16)
    content = moving(4).cuda()
    style = Style((picture(),), (1.0,), prompts=words().prompts)
    options = StylizeOptions(strength=0, steps=6, guidance=5.0, denoise=0.6).for_backbone(model.defaults, model.reads)
    ours = run(model, style, 4, options, content=content)
    # diffusers keeps its latents in half precision, the engine in single: the difference is rounding.
    theirs = plain_diffusers(model, options, style, torch.cat([content[:1], content]).half(), monkeypatch)[1:].float()
    assert (ours - theirs).norm() < 0.02 * ours.norm()
    styled = run(model, style, 9, StylizeOptions(steps=6), window=5, overlap=2, content=moving(9).cuda())
    assert styled.isfinite().all()
    lora = model.with_lora(kohya_file(tmp_path / "a.safetensors", model.unet, 0))
    assert not torch.equal(run(lora, style, 4, options, content=content), ours)
    assert torch.equal(run(model, style, 4, options, content=content), ours)


def test_animatediff_motion_modules(tmp_path):
    """Frames of a window become one clip to the motion modules; what is plain diffusers' stays so."""
    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.errors import ModelError
    from diffusers import MotionAdapter

    made = tiny.parts()
    adapter = tiny._randomise(MotionAdapter(block_out_channels=(32, 32, 64, 64), motion_num_attention_heads=4), 3)
    adapter.save_pretrained(tmp_path / "motion")
    checkpoint = tiny.save_checkpoint(made, tmp_path / "a.safetensors")
    settings = {"sampler": "ddim", "scheduler": "normal"}
    model = load_backbone(checkpoint, torch.device("cpu"), motion=tmp_path / "motion", **settings)
    plain = load_backbone(checkpoint, torch.device("cpu"), **settings)
    assert model.digest != plain.digest
    style = Style((picture(),), (1.0,), prompts=words().prompts)
    options = StylizeOptions(strength=0, steps=4, guidance=3.0)
    moved = run(model, style, 5, options)
    assert not torch.allclose(moved, run(plain, style, 5, options), atol=1e-3)
    x, text = torch.randn(6, 4, 8, 8), [model.text.encode("a house")] * 6
    ours = model.evaluate(x, timestep=torch.tensor(500), text=text, frames=6)
    theirs = model.unet(
        x.movedim(0, 1)[None], 500, encoder_hidden_states=torch.cat([t.tokens for t in text]), return_dict=False
    )[0]
    assert torch.equal(ours, theirs[0].movedim(0, 1))
    styled = run(model, style, 9, StylizeOptions(steps=6), window=5, overlap=2)
    assert styled.isfinite().all()
    with pytest.raises(ModelError, match="motion modules are for SD 1.5"):
        load_backbone(
            tiny.save_checkpoint(tiny.parts("sdxl"), tmp_path / "xl.safetensors"),
            torch.device("cpu"),
            motion=tmp_path / "motion",
        )
    with pytest.raises(ModelError, match="no AnimateDiff motion modules: it is a checkpoint"):
        load_backbone(checkpoint, torch.device("cpu"), motion=checkpoint)
    wide = MotionAdapter(block_out_channels=(32, 32, 64, 128), motion_num_attention_heads=4)
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match="wide does not fit"):
        load_backbone(checkpoint, torch.device("cpu"), motion=tmp_path / "wide")


@pytest.mark.parametrize("text", ["a house", ""])
def test_a_style_of_weight_0_is_no_style(text):
    """Pictures of no weight: the same as without them, but for what holds frames together."""
    model, options = tiny.backbone(), StylizeOptions(steps=6)
    results = [
        run(model, Style((picture(),), (1.0,), weight, words(text, "").prompts), 3, options)
        for weight in (0.0, 0.5, 1.0)
    ]
    apart = options.model_copy(update={"injection": parse_options(knobs="norm=0,latent_norm=0").injection})
    without = run(model, words(text or "@0  ", ""), 3, apart) if text else None
    steps = [(results[i + 1] - results[i]).abs().mean() for i in (0, 1)]
    assert max(steps) < 6 * min(steps)
    if without is not None:
        assert torch.allclose(results[0], without, atol=1e-4)


def test_words_of_a_returning_scene_and_its_anchor():
    """Scene 3 returns to scene 1: its anchor, frame 0, is asked for with scene 3's words."""
    scenes = (Scene(0, 4, 0), Scene(4, 8, 4), Scene(8, 12, 0))
    prompts = parse_prompts("a house\n@scene 3 night\n@0 day\n@10 dusk").checked(Survey(tuple(range(12)), 12, scenes))
    texts = {t for t, scene in prompts.texts(Survey(tuple(range(12)), 12, scenes)) if scene == 2}
    for frame in (0, 8, 9, 10, 11):
        assert {t for t, _ in prompts.at(frame, 2)} <= texts
    assert "a house, night, day" in texts


def test_key_frames_by_number_and_by_time_are_two():
    prompts = parse_prompts("@5 rain\n@5s sun")
    assert len(prompts.keys) == 2
    seen = prompts.checked(Survey(tuple(range(20)), 20, (Scene(0, 20, 0),)))
    assert seen.keys == ((5, "sun"),)


def test_a_lora_s_scenes_reach_the_text_encoder(tmp_path):
    from safetensors.torch import save_file

    model = tiny.backbone()
    file = {}
    for name, _ in model.text.models[0].named_modules():
        if name.endswith("q_proj"):
            key = "lora_te_text_model_" + name.removeprefix("text_model.").replace(".", "_")
            file[f"{key}.lora_down.weight"], file[f"{key}.lora_up.weight"] = torch.randn(2, 64), torch.randn(64, 2)
    save_file(file, tmp_path / "te.safetensors")
    changed = model.with_lora(tmp_path / "te.safetensors", scenes="1, 0")
    survey = Survey(tuple(range(4)), 4, (Scene(0, 2, 0), Scene(2, 4, 2)))
    options = StylizeOptions().for_backbone(model.defaults, model.reads)
    plain, held = (m.condition(words(), options, survey) for m in (model, changed))
    on, off = (held.at(f, scene, changed._text_strengths(scene)).tokens for f, scene in ((0, 0), (2, 1)))
    assert torch.equal(off, plain.at(2, 1, ()).tokens)
    assert not torch.allclose(on, off, atol=1e-3)


def test_single_file_motion_modules(tmp_path):
    """The names of AnimateDiff's own files; positions are not among diffusers' parameters."""
    from comfyui_veostyle.veo_core.backbones.stable_diffusion.files import load_motion
    from diffusers import MotionAdapter
    from safetensors.torch import save_file

    adapter = tiny._randomise(MotionAdapter(block_out_channels=(32, 32, 64, 64)), 3)
    renamed = {
        ".attn1.": ".attention_blocks.0.", ".attn2.": ".attention_blocks.1.", ".norm1.": ".norms.0.", ".norm2.": ".norms.1.",
        ".norm3.": ".ff_norm.", ".pos_embed.": ".attention_blocks.0.pos_encoder.",
    }  # fmt: skip
    state = {}
    for name, value in adapter.state_dict().items():
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        state[re.sub(r"(motion_modules\.\d+)\.", r"\1.temporal_transformer.", name)] = value.clone()
    save_file(state, tmp_path / "mm.safetensors")
    loaded = load_motion(tmp_path / "mm.safetensors", tiny.parts().unet)
    reference = adapter.state_dict()
    own = {k: v for k, v in loaded.state_dict().items() if "motion_modules" in k and not k.endswith(".pe")}
    assert own
    assert all(torch.equal(v, reference[k]) for k, v in own.items())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampler": "heun", "scheduler": "normal"}, "heun' cannot do"),
        ({"sampler": "dpmpp_2m", "scheduler": "karras"}, "karras' puts nearly all steps"),
        ({"sampler": "ddim", "scheduler": "karras"}, "does not go with sampler = 'ddim'"),
        ({"sampler": "x"}, "sampler = 'x' is unknown"),
        ({"prediction": "sample"}, "prediction = 'sample' is unknown"),
        ({"beta_schedule": "wild"}, "noise schedule cannot be used"),
        ({"beta_start": "low"}, "noise schedule cannot be used"),
        ({"prediction_type": "sample"}, "predicts 'sample'"),
    ],
)
def test_noise_settings_that_do_not_go_together(settings, says, tmp_path):
    import json

    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.errors import VeoError

    made = tiny.parts(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    folder = tiny.save_folder(made, tmp_path / "f")
    config = folder / "scheduler" / "scheduler_config.json"
    values = json.loads(config.read_text())
    for name in ("beta_schedule", "beta_start", "prediction_type"):
        values[name] = settings.pop(name, values[name])
    config.write_text(json.dumps(values | {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"}))
    with pytest.raises(VeoError, match=says):
        load_backbone(folder, torch.device("cpu"), **settings)


def test_zero_terminal_snr_runs_and_a_folder_s_solver_settings_do_not_win(tmp_path):
    model = tiny.backbone(
        sampler="dpmpp_2m", scheduler=None, prediction_type="v_prediction", rescale_betas_zero_snr=True,
        use_karras_sigmas=True, algorithm_type="sde-dpmsolver++",
    )  # fmt: skip
    assert model.scheduler == "sgm_uniform"
    latents = run(model, words(), 2, StylizeOptions(steps=5, denoise=1.0))
    assert latents.isfinite().all()
    from comfyui_veostyle.veo_core.sampling.schedule import make_scheduler

    made = make_scheduler(model.schedule_config, "dpmpp_2m", "normal")
    assert not made.config.use_karras_sigmas
    assert made.config.algorithm_type == "dpmsolver++"


def test_too_many_steps_are_told():
    from comfyui_veostyle.veo_core.errors import InputError

    for sampler, steps in (("ddim", 1000), ("lcm", 120)):
        with pytest.raises(InputError, match=f"steps = {steps}"):
            run(tiny.backbone(sampler=sampler), words(), 1, StylizeOptions(steps=steps))


def test_folders_that_are_damaged_or_of_another_kind(tmp_path):
    import json

    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.errors import ModelError

    folder = tiny.save_folder(tiny.parts(), tmp_path / "f")
    index = folder / "model_index.json"
    whole = json.loads(index.read_text())
    for broken in (
        "[]",
        "{",
        json.dumps({"_class_name": None}),
        json.dumps(whole | {"unet": ["diffusers", "SD3Transformer2DModel"]}),
    ):
        index.write_text(broken)
        with pytest.raises(ModelError, match="no diffusers folder"):
            load_backbone(folder, torch.device("cpu"))
    index.write_text(json.dumps(whole))
    (folder / "scheduler" / "scheduler_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"prediction|noise|damaged"):
        load_backbone(folder, torch.device("cpu"), sampler="ddim", scheduler="normal")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no safetensors"):
        load_backbone(folder, torch.device("cpu"))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ("colour=1", "colour=1' is unknown"),
        ("query", "query' is unknown"),
        ("query=2", "query"),
        ("sources=self+moon", "sources"),
    ],
)
def test_knobs_name_what_is_wrong(knobs, says):
    from comfyui_veostyle.veo_core.errors import InputError

    with pytest.raises(InputError, match=says):
        parse_options(knobs=knobs)
    good = parse_options(
        "strong", knobs="query=0.6, adain=key_value, sources=self+anchor+next, layers=0.2+0.8"
    ).injection
    assert (good.query, good.adain, good.sources) == (0.6, "key_value", ("self", "anchor", "next"))
    assert good.denoise == 0.7


def _refused(kind, folder):
    """A file of a kind that is no checkpoint for the engine."""
    import pickle

    from safetensors.torch import save_file

    path, whole = folder / "x.safetensors", tiny.ldm_checkpoint(tiny.parts())
    unet = {k: v for k, v in whole.items() if k.startswith("model.diffusion_model.")}
    one = torch.ones(1, 1)
    made = {
        "unet": unet,
        "vae": {
            k.removeprefix("first_stage_model."): v for k, v in whole.items() if k.startswith("first_stage_model.")
        },
        "diffusers unet": dict(tiny.parts().unet.state_dict()),
        "no text": {k: v for k, v in whole.items() if not k.startswith("cond_stage")},
        "sd2": whole | {"cond_stage_model.model.ln_final.weight": one},
        "refiner": tiny.ldm_checkpoint(tiny.parts("sdxl")) | {"conditioner.embedders.0.model.ln_final.weight": one},
        "inpainting": whole | {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(32, 9, 3, 3)},
        "short": {k: v for k, v in whole.items() if "middle_block.0.in_layers" not in k},
        "lora": {"lora_unet_a.lora_up.weight": one},
        "controlnet": {"control_model.input_blocks.0.0.weight": one},
        "text encoder": {"text_model.encoder.layers.0.mlp.fc1.weight": one},
        "clip vision": {"vision_model.encoder.layers.0.mlp.fc1.weight": one},
        "wan": {"model.diffusion_model.blocks.0.self_attn.q.weight": one},
        "nothing": {},
    }
    if kind == "pickle":
        path.write_bytes(pickle.dumps(whole))
    elif kind == "torch pickle":
        torch.save(unet, path)
    else:
        save_file({k: v.clone().contiguous() for k, v in made.get(kind, whole).items()}, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pickle", "is a pickle or zip archive"),
        ("torch pickle", "is a pickle or zip archive"),
        ("truncated", "not a whole safetensors"),
        ("vae", "it is a VAE alone"),
        ("unet", "holds the UNet but no VAE"),
        ("diffusers unet", "it is the UNet alone"),
        ("no text", "no text encoder"),
        ("sd2", "checkpoint of SD 2"),
        ("refiner", "checkpoint of the SDXL refiner"),
        ("inpainting", "takes 9 channels"),
        ("short", "damaged or not a plain SD 1.5"),
        ("lora", "it is a LoRA"),
        ("controlnet", "it is a ControlNet"),
        ("text encoder", "it is a text encoder alone"),
        ("clip vision", "it is a CLIP image encoder"),
        ("wan", "a checkpoint of another architecture"),
        ("nothing", "it holds no tensors"),
    ],
)
def test_files_that_are_no_checkpoint_say_what_they_are(kind, says, tmp_path):
    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.errors import ModelError

    with pytest.raises(ModelError, match=says) as refused:
        load_backbone(_refused(kind, tmp_path), torch.device("cpu"))
    assert "x.safetensors" in str(refused.value)
    assert "ive " in str(refused.value) or "download" in str(refused.value)  # a remedy


def test_linear_layers_at_half_the_bytes(tmp_path):
    """FP8 weights take less, change little, and adapters still go beside them."""
    from comfyui_veostyle.veo_core.backbones import load_backbone
    from comfyui_veostyle.veo_core.errors import InputError
    from comfyui_veostyle.veo_core.layers.fp8 import Fp8Linear

    path, cpu = tiny.save_checkpoint(tiny.parts(), tmp_path / "a.safetensors"), torch.device("cpu")
    plain, narrow = (load_backbone(path, cpu, weight_dtype=w) for w in (None, "fp8_e4m3fn"))
    assert narrow.weight_bytes < plain.weight_bytes
    assert narrow.digest != plain.digest
    layers = {n for n, m in narrow.unet.named_modules() if isinstance(m, Fp8Linear)}
    assert any("attn1" in n for n in layers)
    assert not any("time" in n for n in layers)
    x, text = torch.randn(2, 4, 8, 8), [plain.text.encode("a house")] * 2
    outputs = [m.evaluate(x, timestep=torch.tensor(500), text=text) for m in (plain, narrow)]
    change = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0 < change < 0.1
    with pytest.raises(InputError, match="weight_dtype = 'int3' is unknown; give fp8_e4m3fn"):
        load_backbone(path, cpu, weight_dtype="int3")
