"""Stable Diffusion as a backbone: partial noise from the source, and style by its attention and norms, without training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from ...cuda_graphs import LAUNCH_BOUND, CudaGraphs, captures
from ...errors import InputError, ModelError
from ...layers.fp8 import WEIGHT_DTYPES, Fp8Linear, to_fp8
from ...layers.st_norm import TemporalContext
from ...layers.style_session import StyleFeatures, StyleSession
from ...lora.injector import LoRA, injected, load_lora
from ...options import Defaults, StylizeOptions
from ...sampling.inversion import invert
from ...sampling.sampler import WindowJob
from ...sampling.schedule import PREDICTIONS, DiffusionSchedule, default_spacing, make_scheduler
from ...style.encoder import Style
from ...style.prompts import Prompts
from ...video.scenes import Survey
from ...weights_file import digest
from ..base import DIFFUSION
from ..styled_window import Shown, StyledWindow
from .files import NAMES, Parts, load_file, load_folder, load_motion
from .fused import fuse
from .ip_adapter import Blocks, ImageTokens, IPAdapter, load_ip_adapter, pictured
from .sites import connected
from .text import TextEmbedding, TextEncoders

Call = Callable[..., Tensor]
# What the graph of a style picture keeps, in maps of the first level: of SD 1.5 at 512x512, 92 MiB; more than SDXL's.
GRAPH_MAPS = 37


@dataclass
class DiffusionCondition:
    """A style as read for one run.

    Attributes:
        style: pictures and their weights. prompts: words by frame.
        embeddings: each text that occurs, by the strengths of the adapters in its scene, encoded once.
        image: the pictures' tokens where an IP-Adapter gives them. no_image: those of no picture.
    """

    style: Style
    prompts: Prompts
    embeddings: dict[tuple[str, tuple[float, ...]], TextEmbedding]
    image: Tensor | None = None
    no_image: Tensor | None = None

    def at(self, frame: int, scene: int, strengths: tuple[float, ...]) -> TextEmbedding:
        """The words that hold at a frame, and the pictures."""
        parts = [(self.embeddings[text, strengths], share) for text, share in self.prompts.at(frame, scene)]
        return replace(TextEmbedding.mix(parts), image=self.image)

    def without(self, text: str, strengths: tuple[float, ...]) -> TextEmbedding:
        """Words alone, no picture."""
        return replace(self.embeddings[text, strengths], image=self.no_image)


class StableDiffusionBackbone:
    """Implements :class:`~..base.Backbone` for SD 1.5 and SDXL.

    With strength 0 a run is diffusers' plain image-to-image of every frame. Otherwise frames read their neighbours and
    the scene's anchor in self-attention, and style pictures enter the up path as ``options.injection`` says.

    Args:
        parts: the networks. digest: of the weights.
        sampler, scheduler: names in :mod:`...sampling.schedule`; None is what suits the sampler and the checkpoint.
    """

    channels = 4
    time_factor = 1
    managed = False
    captured = False
    reads = DIFFUSION

    def __init__(self, parts: Parts, digest: str, sampler: str = "dpmpp_2m", scheduler: str | None = None):
        self.name = NAMES[parts.architecture]
        self.unet, self.vae = parts.unet, parts.vae
        fuse(self.unet)
        fuse(self.vae)
        self.text = TextEncoders(parts.text, skip=int(parts.architecture == "sdxl"))
        self.module = nn.ModuleList([self.unet, self.vae, self.text]).eval().requires_grad_(False)
        scheduler = scheduler or default_spacing(parts.scheduler, sampler)
        self.sampler, self.scheduler, self.schedule_config = sampler, scheduler, parts.scheduler
        make_scheduler(parts.scheduler, sampler, scheduler)
        self.digest = f"{digest}-{sampler}-{scheduler}-{sorted(parts.scheduler.items())}"
        self.loras: tuple[LoRA, ...] = ()
        self.ip_adapter: IPAdapter | None = None
        self.factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        self.multiple = self.factor * 2 ** (len(self.unet.config.block_out_channels) - 1)
        self.defaults = Defaults(steps=20, guidance=7.0, window=16, overlap=4)
        self.weight_bytes = sum(p.nbytes for p in (*self.module.parameters(), *self.module.buffers()))

    def with_lora(
        self, path: Path, strength: float = 1.0, steps: str = "", scenes: str = ""
    ) -> StableDiffusionBackbone:
        """The same model, its networks shared, with one more adapter beside it; see :func:`...lora.injector.load_lora`."""
        parts = {"unet": self.unet} | {f"text {i + 1}": m for i, m in enumerate(self.text.models)}
        lora = load_lora(path, parts, self.name, strength, steps, scenes)
        changed = copy.copy(self)
        changed.loras = (*self.loras, lora)
        changed.digest = f"{self.digest}-{lora.digest}"
        changed.weight_bytes = self.weight_bytes + sum(
            v.numel() * self.unet.dtype.itemsize for a in lora.layers["unet"].values() for v in a.factors.values()
        )
        return changed

    def with_ip_adapter(
        self, path: Path, clip_vision: str | Path, blocks: Blocks = "all", download: bool = False
    ) -> StableDiffusionBackbone:
        """The same model, its networks shared, reading style pictures through an IP-Adapter as well.

        Args:
            clip_vision: the image encoder that the adapter was made with. download: whether a name may be fetched.
            blocks: ``style`` leaves layout to the source.
        """
        changed = copy.copy(self)
        architecture = "sdxl" if self.text.skip else "sd15"
        changed.ip_adapter = load_ip_adapter(path, clip_vision, self.unet, architecture, blocks, download)
        changed.digest = f"{self.digest}-{changed.ip_adapter.digest}"
        if any(isinstance(m, Fp8Linear) for m in self.unet.modules()):
            to_fp8(changed.ip_adapter.tower)
        added = [p for m in changed.ip_adapter.modules() for p in m.parameters()]
        changed.weight_bytes = self.weight_bytes + sum(p.nbytes for p in added)
        changed.module = nn.ModuleList([*self.module, *changed.ip_adapter.modules()])
        return changed

    @property
    def device(self) -> torch.device:
        return next(self.unet.parameters()).device

    @property
    def temporal(self) -> bool:
        """Whether the UNet has motion modules, and takes frames as clips."""
        return hasattr(self.unet.config, "use_motion_mid_block")

    def encode(self, frames: Tensor) -> Tensor:
        mean = self.vae.encode((frames * 2 - 1).to(self.vae.dtype)).latent_dist.mode()
        return (mean * self.vae.config.scaling_factor).float()

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode((latents / self.vae.config.scaling_factor).to(self.vae.dtype)).sample.float() / 2 + 0.5

    def condition(self, style: Style, options: StylizeOptions, survey: Survey) -> DiffusionCondition:
        if self.temporal and options.window + 1 > (room := self.unet.config.motion_max_seq_length):
            raise InputError(f"window = {options.window} is too long for these motion modules; give at most {room - 1}")
        prompts = style.prompts.checked(survey)
        embeddings: dict[tuple[str, tuple[float, ...]], TextEmbedding] = {}
        with ExitStack() as stack:
            held = [
                stack.enter_context(injected(model, f"text {i + 1}", self.loras))
                for i, model in enumerate(self.text.models)
            ]
            for text, scene in prompts.texts(survey):
                factors = self._text_strengths(scene)
                for strengths in held:
                    strengths.values = list(factors)
                if (text, factors) not in embeddings:
                    embeddings[text, factors] = self.text.encode(text)
        image = no_image = None
        if self.ip_adapter is not None and style.pictures:
            image, no_image = self.ip_adapter.tokens(list(style.pictures), list(style.weights))
        return DiffusionCondition(style, prompts, embeddings, image, no_image)

    def _text_strengths(self, scene: int) -> tuple[float, ...]:
        """Strengths of the adapters in the text encoders: a scene's own; steps are the UNet's."""
        return tuple(lora.in_scene(scene) for lora in self.loras)

    def sample(self, condition: DiffusionCondition, job: WindowJob) -> Tensor:
        return _Run(self, condition, job).latents()

    def rehearse(self, x: Tensor, options: StylizeOptions) -> Tensor:
        picture = Style((torch.zeros(3, 8, 8),), (1.0,))
        injection = options.injection.for_style(picture, options.strength)
        session, motion = StyleSession(injection), x.new_empty(len(x), 3, *x.shape[2:])
        temporal = TemporalContext(len(x), hand_over=0, motion=motion)
        width = self.unet.config.cross_attention_dim
        pooled = None if self.text.skip == 0 else x.new_empty(1, self._pooled_width)
        text = TextEmbedding(x.new_empty(1, 77, width), pooled)
        style = x.new_empty(1, *x.shape[1:])
        evaluate = partial(self.evaluate, timestep=torch.tensor(1, device=x.device))
        # The CUDA graph of the style's evaluation keeps its memory while the frames are evaluated.
        held = self._graph_memory(style) if session.wants_style else None
        with connected(self.unet, session):
            if session.wants_style:
                with session.record_style([1.0]):
                    evaluate(style, text=[text])
            if session.wants_content:
                with session.record_content():
                    evaluate(x, text=[text] * len(x))
            with session.apply(0.0, temporal):
                texts = [text] * len(x) * (2 if options.guidance > 1 else 1)
                output = evaluate(x.repeat(len(texts) // len(x), 1, 1, 1), text=texts, frames=len(x))
        del held
        return output

    def guides(self, style: Style) -> bool:
        return style.has_words or (self.ip_adapter is not None and bool(style.pictures))

    def evaluations(self, options: StylizeOptions) -> int:
        return len(self.schedule(options))

    def schedule(self, options: StylizeOptions, generators: list[torch.Generator] | None = None) -> DiffusionSchedule:
        """The steps of a window; ``generators``, one a frame, are for samplers that add noise."""
        return DiffusionSchedule(
            self.schedule_config, self.sampler, self.scheduler, options.steps, options.denoise, self.device, generators
        )

    def _graph_memory(self, x: Tensor) -> Tensor:
        """As much as a replayed evaluation of ``x`` keeps."""
        maps = GRAPH_MAPS if captures(x.device) and x[:, 0].numel() <= LAUNCH_BOUND else 0
        return x.new_empty(maps * self.unet.config.block_out_channels[0] * x[:, 0].numel(), dtype=self.unet.dtype)

    @property
    def _pooled_width(self) -> int:
        return self.unet.config.projection_class_embeddings_input_dim - 6 * self.unet.config.addition_time_embed_dim

    def evaluate(
        self,
        x: Tensor,
        *,
        timestep: Tensor,
        text: list[TextEmbedding],
        frames: int = 1,
        pictures: ImageTokens | None = None,
        call: Call | None = None,
    ) -> Tensor:
        """The UNet's output.

        Args:
            x: ``[B, 4, h, w]``, variance preserving. text: one an entry of the batch.
            frames: entries of the batch that are one clip, for motion modules.
            pictures: given the tokens of the texts' pictures.
            call: calls the network given with the tensors given, in its own way.
        """
        words = TextEmbedding.batch(text)
        if pictures is not None:
            pictures.batch = words.image
        given = [x.to(self.unet.dtype), timestep, words.tokens.to(self.unet.dtype)]
        if words.pooled is not None:
            height, width = (side * self.factor for side in x.shape[-2:])
            ids = torch.tensor([[height, width, 0, 0, height, width]], device=x.device).repeat(len(x), 1)
            given += [words.pooled, ids.to(words.pooled.dtype)]
        network = partial(self._network, frames)
        return (network(*given) if call is None else call(network, *given)).to(x.dtype)

    def _network(self, frames: int, x: Tensor, timestep: Tensor, tokens: Tensor, *added: Tensor) -> Tensor:
        extra = {"added_cond_kwargs": dict(zip(("text_embeds", "time_ids"), added))} if added else {}
        if not self.temporal:
            return self.unet(x, timestep, encoder_hidden_states=tokens, return_dict=False, **extra)[0]
        clips = rearrange(x, "(b t) c h w -> b c t h w", t=frames)
        out = self.unet(clips, timestep, encoder_hidden_states=tokens, return_dict=False, **extra)[0]
        return rearrange(out, "b c t h w -> (b t) c h w")


class _Run:
    """The steps of one window by diffusers' scheduler and UNet."""

    def __init__(self, model: StableDiffusionBackbone, condition: DiffusionCondition, job: WindowJob):
        self.model, self.condition, self.job = model, condition, job
        self.window, self.graphs = StyledWindow(model, condition.style, job), CudaGraphs()
        self.session, self.frames = self.window.session, len(job.content)
        strengths = model._text_strengths(job.scene)
        self.empty = condition.without("", strengths)
        self.negative = condition.without(condition.prompts.negative, strengths)
        self.words = [condition.at(f, job.scene, strengths) for f in job.frames]
        self.guided = job.options.guidance > 1 and model.guides(condition.style)
        self.schedule = model.schedule(job.options, job.generators())

    @torch.no_grad()
    def latents(self) -> Tensor:
        job, schedule, plain, loras = self.job, self.schedule, self.window.plain, self.model.loras
        sites = nullcontext() if plain else connected(self.model.unet, self.session)
        scale = job.options.strength * self.condition.style.weight
        with (
            sites,
            injected(self.model.unet, "unet", loras) as self.strengths,
            pictured(self.model.unet, self.model.ip_adapter, scale) as self.pictures,
        ):
            self.strengths.values = [lora.at(0.0, job.scene) for lora in loras]
            x = self._start()
            for index in range(len(schedule)):
                job.before_step(index)
                self.strengths.values = [lora.at(self._progress(index), job.scene) for lora in loras]
                model_input = schedule.model_input(index, x)
                self.window.record(partial(self._show, index))
                output = self._output(index, model_input)
                before = schedule.clean(index, model_input, output)
                clean = self.window.fused(index, self._progress(index), before)
                if clean is not before:
                    output = schedule.output(index, model_input, clean)
                x = schedule.step(index, x, output)
        return x

    def _start(self) -> Tensor:
        """Latents before the first step, and where asked for the way back to them."""
        content, self.trails = self.window.start(), {}
        if not self.window.injection.inversion or self.window.plain:
            return self.schedule.start(content, self.job.noise())
        self.trails = {"content": self._trail(content)}
        if self.window.pictures is not None:
            self.trails["style"] = self._trail(self.window.pictures)
        return self.schedule.from_variance_preserving(self.trails["content"][0])

    def _trail(self, clean: Tensor) -> list[Tensor]:
        """Latents at each step's level, inverted from clean ones with an empty prompt."""
        levels = [self.schedule.level(i) for i in range(len(self.schedule))]

        def noise_of(x: Tensor, index: int) -> Tensor:
            self.job.before_step(0)
            output = self._evaluate(x, index, [self.empty] * len(x), frames=len(x))
            predicted = self.schedule.clean(index, x, output)
            a, s = levels[index]
            return (x - a * predicted) / s

        return invert(clean, levels, noise_of)

    def _show(self, index: int, shown: Shown, clean: Tensor, noise: Tensor) -> None:
        """Runs the UNet on latents at a step's level of noise, for the session to listen."""
        a, s = self.schedule.level(index)
        x = self.trails[shown][index] if shown in self.trails else a * clean + s * noise
        text = [self.empty] * len(x)
        if shown == "style":
            self._evaluate(x, index, text, call=self._replayed_style)
        else:
            self._evaluate(x, index, text, frames=self.frames)

    def _evaluate(
        self, x: Tensor, index: int, text: list[TextEmbedding], frames: int = 1, call: Call | None = None
    ) -> Tensor:
        timestep = self.schedule.timesteps[index]
        return self.model.evaluate(x, timestep=timestep, text=text, frames=frames, pictures=self.pictures, call=call)

    def _replayed_style(self, network: Call, *given: Tensor) -> Tensor:
        """The network over style pictures by a CUDA graph where it pays, and what the session records of it."""

        def recorded(*given: Tensor) -> tuple[Tensor, StyleFeatures]:
            return network(*given), self.session.style_features

        # The plan knows of one picture's graph.
        if len(self.window.pictures) > 1 or not self._replays(given[0]):
            return network(*given)
        output, self.session.style_features = self.graphs(("style", self.strengths.captured), recorded, *given)
        return output

    def _replayed_plain(self, network: Call, *given: Tensor) -> Tensor:
        """The model as it is by a CUDA graph where it pays."""
        if not self._replays(given[0]):
            return network(*given)
        return self.graphs(("plain", self.strengths.captured), network, *given).clone()

    def _replays(self, x: Tensor) -> bool:
        """Whether the GPU would wait for launches, and nothing beyond the network's inputs changes between calls."""
        pictures = self.pictures.batch is not None
        return captures(x.device) and x[:, 0].numel() <= LAUNCH_BOUND and not pictures and not self.model.temporal

    def _output(self, index: int, model_input: Tensor) -> Tensor:
        """The model's output for all frames, guided."""
        job = self.job
        temporal = job.temporal(index)
        text = list(self.words)
        if self.guided:
            text = [self.negative] * self.frames + text
        batch = torch.cat([model_input] * (len(text) // self.frames))
        with nullcontext() if self.window.plain else self.session.apply(self._progress(index), temporal):
            call = self._replayed_plain if self.window.plain else None
            output = self._evaluate(batch, index, text, frames=self.frames, call=call)
        if not self.guided:
            return output
        plain, worded = output.chunk(2)
        return plain + job.options.guidance * (worded - plain)

    def _progress(self, index: int) -> float:
        return index / max(1, len(self.schedule) - 1)


def load(
    path: Path,
    device: torch.device,
    sampler: str = "dpmpp_2m",
    scheduler: str | None = None,
    motion: Path | None = None,
    prediction: str | None = None,
    dtype: torch.dtype | None = None,
    weight_dtype: str | None = None,
) -> StableDiffusionBackbone:
    """Loads a checkpoint.

    Args:
        path: a safetensors file or a diffusers folder. motion: AnimateDiff's motion modules, SD 1.5 only.
        prediction: ``epsilon`` or ``v_prediction``, for files that do not tell which they were trained for.
        dtype: computed in; None is fp16 on a GPU and float32 on the CPU.
        weight_dtype: ``fp8_e4m3fn`` keeps the linear layers of the UNet, the text encoders, and an IP-Adapter's image
            encoder so; None keeps ``dtype``.

    Raises:
        ModelError: what is wrong with the file, and what was expected.
        InputError: a setting that is unknown, or does not go with another.
    """
    if weight_dtype not in (None, *WEIGHT_DTYPES):
        raise InputError(f"weight_dtype = {weight_dtype!r} is unknown; give {' or '.join(WEIGHT_DTYPES)}")
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    parts = load_folder(path, dtype) if path.is_dir() else load_file(path, dtype)
    if prediction is not None:
        if prediction not in PREDICTIONS:
            raise InputError(f"prediction = {prediction!r} is unknown; give {' or '.join(PREDICTIONS)}")
        parts.scheduler["prediction_type"] = prediction
    # In fp16 the VAE of SDXL overflows; diffusers marks every VAE so by default.
    if parts.architecture == "sdxl" and parts.vae.config.force_upcast:
        parts.vae.float()
    mark = digest(path)
    if motion is not None:
        if parts.architecture != "sd15":
            raise ModelError(f"{motion}: motion modules are for SD 1.5, and {path} is {NAMES[parts.architecture]}")
        parts.unet = load_motion(motion, parts.unet)
        mark += digest(motion)
    if weight_dtype is not None:
        for model in (parts.unet, *parts.text):
            to_fp8(model)
        mark += f"-{weight_dtype}"
    backbone = StableDiffusionBackbone(parts, mark, sampler, scheduler)
    backbone.module.to(device)
    return backbone
