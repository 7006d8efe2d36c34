"""A MODEL, VAE and CLIP of ComfyUI as a backbone of the engine: core samples, and the engine's style sessions listen in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..kernels.cross_frame_attention import cross_frame_attention, takes
from ..veo_core.backbones.base import DIFFUSION
from ..veo_core.backbones.stable_diffusion.text import TextEmbedding
from ..veo_core.backbones.styled_window import Shown, StyledWindow
from ..veo_core.errors import InputError, ModelError
from ..veo_core.layers.st_norm import TemporalContext
from ..veo_core.layers.style_session import Site, StyleSession, sites_of
from ..veo_core.memory.trace import declare_handed, declare_workspace, tracing
from ..veo_core.options import Defaults, StylizeOptions
from ..veo_core.sampling.sampler import WindowJob
from ..veo_core.sampling.schedule import steps_done
from ..veo_core.style.encoder import Style
from ..veo_core.style.prompts import Prompts
from ..veo_core.video.scenes import Survey

KEY = "veostyle"
ADAPTIVE = ("dpm_adaptive",)
# Samplers of core, by how their names begin, that evaluate the model more than once a step.
SEVERAL = {
    "heun": 2, "heunpp2": 3, "exp_heun_2": 2, "dpm_2": 2, "dpmpp_2s": 2, "dpmpp_sde": 2, "seeds_2": 2, "seeds_3": 3,
    "sa_solver_pece": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What is particular to a kind of model.

    Attributes:
        name: for people. blocks: where a transformer keeps its blocks; empty for UNets.
        patch: latent pixels in a token's side.
    """

    name: str
    blocks: str
    patch: int
    defaults: Defaults


FAMILIES = {
    "BaseModel": Family("SD 1.5", "", 1, Defaults(steps=20, guidance=7.0, window=16, overlap=4)),
    "SDXL": Family("SDXL", "", 1, Defaults(steps=20, guidance=6.0, window=16, overlap=4)),
    "WAN21": Family("Wan 2.1 or 2.2 14B", "blocks", 2, Defaults(steps=20, guidance=5.0, window=33, overlap=8)),
    "WAN22": Family("Wan 2.2 5B", "blocks", 2, Defaults(steps=20, guidance=5.0, window=33, overlap=8)),
    "LTXV": Family("LTXV", "transformer_blocks", 1, Defaults(steps=20, guidance=3.0, window=49, overlap=16)),
}


# Classes of core that are one of these inside and need more than frames and words, by how their names begin.
VARIANTS = {
    "WAN21_Vace": "Wan VACE, which takes control videos",
    "WAN21_Camera": "Wan with camera control, which takes a camera's path",
    "WAN21_HuMo": "Wan HuMo, which takes sound and references",
    "WAN22_Animate": "Wan Animate, which takes poses and faces",
    "WAN_Animate": "Wan Animate, which takes poses and faces",
    "WAN22_S2V": "Wan speech to video, which takes sound",
    "WAN21_SCAIL": "Wan SCAIL, which takes poses and references",
    "WAN21_FlowRVS": "Wan FlowRVS, which segments videos",
    "WAN21_CausalAR": "causal Wan, which only its own sampler runs",
    "WAN22_WanDancer": "WanDancer, which takes music",
    "LTXAV": "LTX with sound (LTX-2), whose latents hold both",
}


def family_of(model: Any) -> Family:
    """The family of a MODEL. Raises ModelError for another architecture, and for one that takes more than frames and words."""
    kind, config = type(model.model).__name__, type(model.model.model_config).__name__
    known = ", ".join(f.name for f in FAMILIES.values())
    if variant := next((text for start, text in VARIANTS.items() if kind.startswith(start)), None):
        raise ModelError(
            f"model is {variant}; this node gives frames and words alone. Connect a text-to-video MODEL of {known}"
        )
    if kind not in FAMILIES or (kind == "BaseModel" and config != "SD15"):
        raise ModelError(f"model is a {config} ({kind}), which is not known here; give a MODEL of {known}")
    taken = getattr(model.get_model_object("diffusion_model"), "in_dim", None)
    channels = model.model.latent_format.latent_channels
    if kind.startswith("WAN") and taken not in (None, channels):
        # Core would fill the rest with zeros, which such a model was not trained on.
        raise ModelError(
            f"model is a Wan that takes {taken - channels} more channels of an image, mask or control video (image to "
            "video, Fun), which this node does not give; connect a text-to-video MODEL"
        )
    return FAMILIES[kind]


@dataclass
class ComfyCondition:
    """A style as read for one run: pictures, words by frame, and each text that occurs as core's conditioning."""

    style: Style
    prompts: Prompts
    encoded: dict[str, list]

    def positive(self, frames: list[int], scene: int) -> list:
        """Core's conditioning for a batch of frames."""
        parts = [self.prompts.at(f, scene) for f in frames]
        texts = {text for part in parts for text, _ in part}
        if len(texts) == 1:
            return self.encoded[texts.pop()]
        entries = {text: self.encoded[text][0] for text in texts}
        extra = dict(entries[parts[0][0][0]][1])
        has_pooled = extra.get("pooled_output") is not None
        words = {t: TextEmbedding(e[0], e[1]["pooled_output"] if has_pooled else None) for t, e in entries.items()}
        mixed = TextEmbedding.batch([TextEmbedding.mix([(words[t], share) for t, share in part]) for part in parts])
        if has_pooled:
            extra["pooled_output"] = mixed.pooled
        return [[mixed.tokens, extra]]


class ComfyBackbone:
    """Implements :class:`~..veo_core.backbones.base.Backbone` for SD 1.5, SDXL, Wan and LTXV as core loads them.

    Core's sampler runs each window on a clone of the MODEL, so that LoRA and what other packs patched go on working. With
    strength 0 the result is core's own.

    Its weights count as nothing in a plan: core moves as many of them as fit.

    Args:
        model, vae, clip: of core. sampler, scheduler: names in core's lists.
        identity: tells this model from others across sessions.
    """

    managed = True
    captured = False
    reads = DIFFUSION

    def __init__(self, model: Any, vae: Any, clip: Any, sampler: str, scheduler: str, identity: str):
        for name, given in (("model", model), ("vae", vae), ("clip", clip)):
            if given is None:
                raise InputError(
                    f"{name} is empty: the loader before this found none in its file; connect another loader"
                )
        if sampler in ADAPTIVE:
            raise InputError(
                f"sampler_name = {sampler} chooses its own number of steps, and windows could not meet; give another"
            )
        self.family = family_of(model)
        self.model, self.vae, self.clip = model, vae, clip
        self.sampler, self.scheduler = sampler, scheduler
        self.name, self.digest = f"ComfyUI {self.family.name}", f"{identity}-{sampler}-{scheduler}"
        self.defaults = self.family.defaults
        self.channels = model.model.latent_format.latent_channels
        if vae.latent_channels != self.channels:
            raise ModelError(
                f"vae gives latents of {vae.latent_channels} channels, and {self.family.name} takes {self.channels}; "
                "connect the VAE that belongs to the model"
            )
        if self.is_video and getattr(vae, "latent_dim", 3) != 3:
            raise ModelError(
                f"vae is one for pictures, and {self.family.name} takes one for video; connect the model's own"
            )
        self.factor = vae.spacial_compression_encode()
        self.time_factor = (vae.temporal_compression_decode() or 1) if self.is_video else 1
        self.multiple = self.factor * self.family.patch
        self.weight_bytes = 0

    @property
    def is_video(self) -> bool:
        """Whether frames of a window are one clip to the model, with attention over time of its own."""
        return bool(self.family.blocks)

    @property
    def temporal(self) -> bool:
        return self.is_video

    @property
    def module(self) -> torch.nn.Module:
        return self.model.model

    @property
    def device(self) -> torch.device:
        return comfy.model_management.get_torch_device()

    def encode(self, frames: Tensor) -> Tensor:
        if tracing(frames):
            declare_workspace(self._vae_memory(self.vae.memory_used_encode, frames.shape))
            count = 1 + (len(frames) - 1) // self.time_factor
            return frames.new_empty(count, self.channels, *(s // self.factor for s in frames.shape[2:]))
        latents = self.vae.encode(frames.movedim(1, -1)[..., :3]).to(self.device, torch.float32)
        return latents[0].movedim(1, 0) if self.is_video else latents

    def decode(self, latents: Tensor) -> Tensor:
        if tracing(latents):
            declare_workspace(self._vae_memory(self.vae.memory_used_decode, latents.shape))
            count = 1 + (len(latents) - 1) * self.time_factor
            return latents.new_empty(count, 3, *(s * self.factor for s in latents.shape[2:]))
        # Some video decoders add noise of their own, from the global generator.
        with torch.random.fork_rng(enabled=self.is_video):
            torch.manual_seed(0) if self.is_video else None
            frames = self.vae.decode(latents.movedim(0, 1)[None] if self.is_video else latents)
        frames = frames[0] if frames.ndim == 5 else frames
        return frames.to(self.device, torch.float32).movedim(-1, 1)

    def _vae_memory(self, estimate: Callable, shape: torch.Size) -> float:
        """Core's estimate; for pictures it is that of one, and core takes as many at once as it finds room for."""
        return estimate(_video_shape(self, shape), self.vae.vae_dtype) * (1 if self.is_video else shape[0])

    def condition(self, style: Style, options: StylizeOptions, survey: Survey) -> ComfyCondition:
        if options.injection.inversion:
            raise InputError("inversion = True is for checkpoints of Load Model (VeoStyle); turn it off for a MODEL")
        sources = options.injection.for_style(style, options.strength).sources
        if "warped" in sources and not self.is_video and _attention_override(self.model):
            raise InputError(
                "sources = warped gives each place tokens of its own, and another pack's node on this MODEL replaces the "
                "attention; take that node out, or give sources = self+previous+anchor"
            )
        prompts = style.prompts.checked(survey)
        rate = float(survey.frames / survey.duration) if survey.duration else 25.0
        texts = sorted({text for text, _ in prompts.texts(survey)})
        return ComfyCondition(style, prompts, {text: self._encoded(text, rate) for text in texts})

    def _encoded(self, text: str, rate: float) -> list:
        conditioning = self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))
        if self.family.name != "LTXV":
            return conditioning
        return [[tokens, extra | {"frame_rate": rate}] for tokens, extra in conditioning]

    def sample(self, condition: ComfyCondition, job: WindowJob) -> Tensor:
        return _Run(self, condition, job).latents()

    def rehearse(self, x: Tensor, options: StylizeOptions) -> Tensor:
        # Where both branches of guidance do not fit core runs them one after the other, and moves weights as it must.
        declare_workspace(int(self.model.memory_required(list(_video_shape(self, x.shape)))))
        if options.injection.norm and not self.is_video:
            norms = _up_norms(self.model.get_model_object("diffusion_model"))
            declare_handed(x.new_empty(2, 2, sum(norm.num_channels for _, norm in norms)))
        return torch.empty_like(x)

    def guides(self, style: Style) -> bool:
        return style.has_words

    def evaluations(self, options: StylizeOptions) -> int:
        times = max((n for start, n in SEVERAL.items() if self.sampler.startswith(start)), default=1)
        return times * steps_done(options.steps, options.denoise)


def _video_shape(backbone: ComfyBackbone, shape: torch.Size) -> tuple[int, ...]:
    """``[n, C, h, w]`` as core's estimates take it: a video is ``[1, C, n, h, w]``."""
    return (1, shape[1], shape[0], *shape[2:]) if backbone.is_video else tuple(shape)


class _Run:
    """One window through core's sampler."""

    def __init__(self, backbone: ComfyBackbone, condition: ComfyCondition, job: WindowJob):
        self.backbone, self.condition, self.job = backbone, condition, job
        self.window = StyledWindow(backbone, condition.style, job)
        self.session = self.window.session
        # A video's first latent frame is its anchor already.
        self.skipped = int(backbone.is_video and job.window.start == job.window.scene.anchor)
        self.calls, self.recorded, self.progress = 0, None, 0.0

    @torch.no_grad()
    def latents(self) -> Tensor:
        backbone, job, options = self.backbone, self.job, self.job.options
        job.before_step(0)
        with self._patched() as model:
            sampler = comfy.samplers.KSampler(
                model, options.steps, backbone.device, backbone.sampler, backbone.scheduler, 1.0, model.model_options
            )
            done = steps_done(options.steps, options.denoise)
            frames = job.frames[self.skipped :]
            result = comfy.sample.sample_custom(
                model,
                self._to_core(job.noise()[self.skipped :]),
                options.guidance,
                self._sampler(),
                sampler.sigmas[-(done + 1) :],
                self.condition.positive(frames[len(frames) // 2 :][:1] if backbone.is_video else frames, job.scene),
                self.condition.encoded[self.condition.prompts.negative],
                self._to_core(self.window.start()[self.skipped :]),
                callback=lambda step, clean, x, total: job.before_step(step),
                disable_pbar=True,
                seed=options.seed,
            )
        result = self._from_core(result.to(job.content))
        return torch.cat([result[: self.skipped], result])

    def _to_core(self, x: Tensor) -> Tensor:
        return x.movedim(0, 1)[None] if self.backbone.is_video else x

    def _from_core(self, x: Tensor) -> Tensor:
        return x[0].movedim(0, 1) if self.backbone.is_video else x

    def _processed(self, x: Tensor) -> Tensor:
        """Latents as the network knows them."""
        return self._from_core(self.backbone.model.model.process_latent_in(self._to_core(x)))

    def _sampler(self) -> Any:
        """Core's sampler; where it adds noise between steps, each frame has its own."""
        made = comfy.samplers.sampler_object(self.backbone.sampler)
        function = getattr(made, "sampler_function", None)
        if function is None or "noise_sampler" not in inspect.signature(function).parameters:
            return made
        generators = self.job.generators()[self.skipped :]
        shape = self.job.content.shape[1:]

        def noise(sigma: Tensor, sigma_next: Tensor) -> Tensor:
            drawn = torch.stack([torch.randn(shape, generator=g) for g in generators])
            return self._to_core(drawn).to(self.backbone.device)

        made.extra_options = made.extra_options | {"noise_sampler": noise}
        return made

    @contextmanager
    def _patched(self) -> Iterator[Any]:
        """A clone of the MODEL whose attention, network and predictions come by here; nothing is left afterwards."""
        model = self.backbone.model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: self._fused(args["denoised"]))
        with ExitStack() as stack:
            if not self.window.plain:
                self._listen(model, stack)
            yield model

    def _listen(self, model: Any, stack: ExitStack) -> None:
        at = SimpleNamespace(block=None, calls=0)
        network = model.get_model_object("diffusion_model")
        if self.backbone.is_video:
            count = len(getattr(network, self.backbone.family.blocks))
            _watch_blocks(model, count, at)
            sites = {i: Site(str(i), i / max(1, count - 1)) for i in range(count)}
        else:
            _watch_self_attention(model, at)
            sites = _unet_sites(network)
            if self.window.injection.norm:
                norms = _up_norms(network)
                for place, (name, norm) in enumerate(norms):
                    site = Site(name, place / max(1, len(norms) - 1))
                    stack.callback(norm.register_forward_hook(self.session.norm_hook(site)).remove)
        _override_attention(model, self.session, at, sites)
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, self._network)

    def _network(self, executor: Callable, *args: Any, **kwargs: Any) -> Any:
        """The network's own call, after the session was shown the style and the source at this level of noise."""
        options = args[5]
        sigma = options["sigmas"][:1]
        if self.recorded != float(sigma):
            self.recorded = float(sigma)
            self.window.record(partial(self._show, executor, args, kwargs, sigma))
        sigmas = options["sample_sigmas"]
        self.progress = min(1.0, float((sigmas.to(sigma) - sigma).abs().argmin()) / max(1, len(sigmas) - 2))
        branches = tuple(map(str, options["cond_or_uncond"]))
        temporal = replace(self.job.temporal(self.calls), branches=branches)
        if self.backbone.is_video:
            temporal = TemporalContext()
        with self.session.apply(self.progress, temporal):
            return executor(*args, **kwargs)

    def _show(
        self,
        executor: Callable,
        args: tuple,
        kwargs: dict,
        sigma: Tensor,
        shown: Shown,
        latents: Tensor,
        noise: Tensor,
    ) -> None:
        """The network on other latents, with the words that the batch's first entry has and without ControlNet.

        A video model is shown the source as one clip, and each picture as a clip of its own.
        """
        if shown == "content":
            latents, noise = (self._to_core(x[self.skipped :]) for x in (latents, noise))
        elif self.backbone.is_video:
            latents, noise = latents[:, :, None], noise[:, :, None]
        model, x = self.backbone.model.model, args[0]
        sampling, count = model.model_sampling, len(latents)
        clean = model.process_latent_in(latents.to(sigma.device))
        sigmas = sigma.expand(count)
        shaped = sigmas.reshape(-1, *[1] * (clean.ndim - 1))
        noisy = sampling.noise_scaling(shaped, noise.to(clean), clean, False)
        scaled = sampling.calculate_input(sigmas, noisy).to(x.dtype)
        # What core concatenates to the latents, such as an image-to-video model's first frame, stays as it is.
        if x.shape[1] > scaled.shape[1]:
            rest = x[:1, scaled.shape[1] :, : scaled.shape[2]] if x.ndim == 5 else x[:1, scaled.shape[1] :]
            scaled = torch.cat([scaled, rest.expand(count, *rest.shape[1:])], dim=1)

        def first(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim and len(value) == len(x):
                return value[:1].expand(count, *value.shape[1:])
            return value

        others = [first(v) for v in args[1:]]
        if not self.backbone.is_video:
            others[3] = None
        executor(scaled, *others, **{k: None if k == "control" else first(v) for k, v in kwargs.items()})

    def _fused(self, clean: Tensor) -> Tensor:
        """A predicted clean batch after ST-Norm and the cross-fade with the window before."""
        index, own = self.calls, self._from_core(clean)
        self.calls += 1
        frames = torch.cat([own[: self.skipped], own])
        fused = self.window.fused(index, self.progress, frames, self._processed)[self.skipped :]
        return clean if fused.equal(own) else self._to_core(fused).to(clean)


def _unet_sites(network: torch.nn.Module) -> dict[tuple[str, int, int], Site]:
    """Self-attentions of a UNet by side, block and place in the block, as core's options name them."""
    names = [n for n, _ in network.named_modules() if n.endswith(".attn1")]
    sites = {}
    for name, site in sites_of(names, "output_blocks.").items():
        path = name.split(".")
        side = {"input_blocks": "input", "middle_block": "middle", "output_blocks": "output"}[path[0]]
        sites[side, 0 if side == "middle" else int(path[1]), int(path[-2])] = site
    return sites


def _up_norms(network: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """First group norm of each residual block of the up path."""
    found = ((n, m) for n, m in network.named_modules() if n.startswith("output_blocks."))
    return [(n, m) for n, m in found if n.endswith(".in_layers.0")]


def _watch_self_attention(model: Any, at: SimpleNamespace) -> None:
    """Notes which attention of a UNet comes next."""

    def self_attention(n: Tensor, context: Tensor, value: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        at.block = (*extra["block"][:2], extra["block_index"])
        return n, context, value

    def cross_attention(n: Tensor, context: Tensor, value: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        at.block = None
        return n, context, value

    model.set_model_attn1_patch(self_attention)
    model.set_model_attn2_patch(cross_attention)


def _watch_blocks(model: Any, count: int, at: SimpleNamespace) -> None:
    """Notes which block of a transformer runs; a block's first attention is its self-attention."""
    existing = model.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
    for index in range(count):
        before = existing.get(("double_block", index))

        def block(args: dict, extra: dict, index: int = index, before: Callable | None = before) -> dict:
            at.block, at.calls = index, 0
            try:
                return before(args, extra) if before else extra["original_block"](args)
            finally:
                at.block = None

        model.set_model_patch_replace(block, "dit", "double_block", index)


def _attention_override(model: Any) -> Callable | None:
    """What another pack has set in place of core's attention."""
    return model.model_options["transformer_options"].get("optimized_attention_override")


def _override_attention(model: Any, session: StyleSession, at: SimpleNamespace, sites: dict[Any, Site]) -> None:
    """Hands self-attentions to the session; what another pack has set there is still called."""
    before = _attention_override(model)

    def override(
        func: Callable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **more: Any,
    ) -> Tensor:
        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            settings = {
                "mask": mask,
                "attn_precision": attn_precision,
                "skip_reshape": skip_reshape,
                "skip_output_reshape": skip_output_reshape,
            }
            return (
                before(func, q, k, v, heads, **settings, **more) if before else func(q, k, v, heads, **settings, **more)
            )

        is_self, at.calls = at.block is not None and (at.calls == 0 or isinstance(at.block, tuple)), at.calls + 1
        if not is_self or at.block not in sites or skip_reshape or skip_output_reshape:
            return core(q, k, v)

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (heads, -1)).transpose(1, 2)

        def join(x: Tensor) -> Tensor:
            return x.transpose(1, 2).flatten(2)

        q, k, v = map(split, (q, k, v))
        # Another pack's attention, a mask or a precision asked for are core's to heed.
        ours = not (before or mask is not None or attn_precision) and takes(q, k, v)
        across = cross_frame_attention if ours else None
        return join(session.attend(sites[at.block], q, k, v, lambda *x: split(core(*map(join, x))), across))

    model.model_options["transformer_options"]["optimized_attention_override"] = override
