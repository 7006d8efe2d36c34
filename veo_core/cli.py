"""The command line ``veostyle``: the engine for people without a canvas."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from .errors import VeoError
from .progress import Pace, Progress

if TYPE_CHECKING:
    from .engine import Stylizer
    from .memory.plan import MemoryPlan
    from .options import StylizeOptions
    from .style.encoder import Style
    from .video.reader import Clip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turns a video into the style of a picture, steadily from frame to frame, whatever its length.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
err = Console(stderr=True)

VideoPath = Annotated[
    Path, typer.Option("--video_path", "--video-path", help="Video, animated picture or folder of stills.")
]
StyleImages = Annotated[
    list[Path] | None, typer.Option("--style_image", "--style-image", help="Style picture; give several to blend them.")
]
StyleText = Annotated[
    str,
    typer.Option(
        "--style_text",
        "--style-text",
        help="Style in words, for checkpoints. Lines may begin with @scene 2, @48 (a frame) or @2.5s.",
    ),
]
NegativeText = Annotated[
    str, typer.Option("--negative_text", "--negative-text", help="What is not wanted, in words; for checkpoints.")
]
StyleWeights = Annotated[
    list[float] | None,
    typer.Option("--style_weight", "--style-weight", help="Weight of each style picture, in their order."),
]
Prediction = Annotated[str | None, typer.Option(help="For checkpoints that do not tell: epsilon or v_prediction.")]
Inversion = Annotated[bool, typer.Option(help="For checkpoints: start from DDIM inversion of the source.")]
Knobs = Annotated[
    str, typer.Option(help="Of the preset, set otherwise, such as query=0.6,adain=key_value,sources=self+anchor.")
]
Overlap = Annotated[
    int | None, typer.Option(help="Frames that two windows share, at most half of one; the model's own when missing.")
]
Strength = Annotated[
    float, typer.Option(help="How far to go: 1 is the full style, 0 the plain model (veo-mini: the source).")
]
Seed = Annotated[int, typer.Option(help="Of the noise, where the model uses any.")]
CutDetection = Annotated[str, typer.Option(help="Of cuts: builtin, or transnetv2 when that package is installed.")]
MinScene = Annotated[int, typer.Option("--min_scene", "--min-scene", help="Frames of the shortest scene.")]
Sampler = Annotated[
    str | None,
    typer.Option(help="For checkpoints: dpmpp_2m, ddim, euler, euler_ancestral, heun, dpmpp_2m_sde, uni_pc, lcm."),
]
Scheduler = Annotated[str | None, typer.Option(help="For checkpoints: karras, normal, exponential or sgm_uniform.")]
WeightDtype = Annotated[
    str | None,
    typer.Option(
        "--weight_dtype",
        "--weight-dtype",
        help="fp8_e4m3fn: linear layers of a checkpoint and of an image encoder at half the bytes.",
    ),
]
MotionModule = Annotated[
    Path | None, typer.Option("--motion_module", "--motion-module", help="AnimateDiff motion modules, for SD 1.5.")
]
Loras = Annotated[
    list[str] | None, typer.Option("--lora", help="LoRA file or PEFT folder, FILE or FILE:STRENGTH; give several.")
]
IPAdapterFile = Annotated[
    Path | None, typer.Option("--ip_adapter", "--ip-adapter", help="IP-Adapter (safetensors); needs --clip_vision.")
]
ClipVision = Annotated[
    str | None,
    typer.Option(
        "--clip_vision",
        "--clip-vision",
        help="CLIP image encoder (safetensors), the one that the IP-Adapter was made with; "
        "or a name of open_clip's such as ViT-H-14:laion2b_s32b_b79k with --allow_download.",
    ),
]
AllowDownload = Annotated[
    bool, typer.Option("--allow_download", "--allow-download", help="Let open_clip fetch an encoder given by name.")
]
IPBlocks = Annotated[str, typer.Option("--ip_blocks", "--ip-blocks", help="Of the IP-Adapter: all, or style.")]
Preset = Annotated[
    str, typer.Option(help="How style enters a checkpoint without training: faithful, balanced or strong.")
]
Denoise = Annotated[
    float | None, typer.Option(help="For checkpoints: share of the noise schedule; the preset's own when missing.")
]
WindowSize = Annotated[int | None, typer.Option(help="Frames denoised together; the model's own when missing.")]
Budget = Annotated[
    float | None,
    typer.Option("--memory_gb", "--memory-gb", help="Memory budget on the device in GB; free memory when missing."),
]
MemoryPolicy = Annotated[
    str,
    typer.Option(
        "--memory_policy",
        "--memory-policy",
        help="fast encodes and decodes as many frames at once as fill the chip, lean one; the result is the same.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[
    Path | None,
    typer.Option(
        help="SD 1.5 or SDXL checkpoint (safetensors, or a diffusers folder); the bundled veo-mini when missing."
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--num_inference_steps", "--num-inference-steps", help="Denoising steps; the model's own number when missing."
    ),
]
Guidance = Annotated[
    float | None, typer.Option("--guidance_scale", "--guidance-scale", help="Classifier-free guidance scale; 1 is off.")
]
Start = Annotated[float, typer.Option(help="Seconds of the video to skip.")]
Duration = Annotated[float | None, typer.Option(help="Seconds of the video to take.")]
Rate = Annotated[
    float | None, typer.Option("--force_rate", "--force-rate", help="Frames per second; the video's own when missing.")
]
EveryNth = Annotated[int, typer.Option("--every_nth", "--every-nth", help="Take one frame in so many.")]
MaxFrames = Annotated[int | None, typer.Option("--max_frames", "--max-frames", help="Take at most so many frames.")]
Width = Annotated[int | None, typer.Option(help="Width in pixels; aspect is kept when only one side is given.")]
Height = Annotated[int | None, typer.Option(help="Height in pixels.")]
Debug = Annotated[bool, typer.Option(help="Show the traceback of an error.")]


@dataclass(frozen=True)
class RunRequest:
    """All that decides a run and its plan, as given on the command line; ``stylize`` and ``plan`` build it alike."""

    video_path: VideoPath
    style_image: StyleImages = None
    style_text: StyleText = ""
    negative_text: NegativeText = ""
    style_weight: StyleWeights = None
    model: Model = None
    lora: Loras = None
    ip_adapter: IPAdapterFile = None
    clip_vision: ClipVision = None
    ip_blocks: IPBlocks = "style"
    allow_download: AllowDownload = False
    sampler: Sampler = None
    scheduler: Scheduler = None
    motion_module: MotionModule = None
    prediction: Prediction = None
    weight_dtype: WeightDtype = None
    preset: Preset = "balanced"
    denoise: Denoise = None
    inversion: Inversion = False
    knobs: Knobs = ""
    window: WindowSize = None
    overlap: Overlap = None
    num_inference_steps: Steps = None
    guidance_scale: Guidance = None
    strength: Strength = 1.0
    seed: Seed = 0
    start: Start = 0.0
    duration: Duration = None
    force_rate: Rate = None
    every_nth: EveryNth = 1
    max_frames: MaxFrames = None
    width: Width = None
    height: Height = None
    detector: CutDetection = "builtin"
    min_scene: MinScene = 1
    memory_gb: Budget = None
    memory_policy: MemoryPolicy = "fast"
    device: Device = "auto"

    def options(self) -> StylizeOptions:
        """What decides the result, beside the clip, the style and the model."""
        from .options import parse_options

        return parse_options(
            self.preset,
            self.inversion,
            self.knobs,
            steps=self.num_inference_steps,
            guidance=self.guidance_scale,
            strength=self.strength,
            seed=self.seed,
            detector=self.detector,
            min_scene=self.min_scene,
            denoise=self.denoise,
            window=self.window,
            overlap=self.overlap,
        )

    def clip(self) -> Clip:
        """The piece of video."""
        from .video.reader import open_clip

        return open_clip(
            self.video_path,
            start=self.start,
            duration=self.duration,
            rate=self.force_rate,
            every_nth=self.every_nth,
            max_frames=self.max_frames,
            width=self.width,
            height=self.height,
        )

    def style(self) -> Style:
        """Pictures and words."""
        from .style.encoder import load_style
        from .style.prompts import parse_prompts

        prompts = parse_prompts(self.style_text, self.negative_text)
        return load_style(self.style_image or [], self.style_weight, prompts=prompts)

    def engine(self) -> Stylizer:
        """The model with all that is put beside its weights."""
        from .engine import Stylizer

        backbone, flow = _load(
            self.model,
            self.device,
            sampler=self.sampler,
            scheduler=self.scheduler,
            motion=self.motion_module,
            prediction=self.prediction,
            weight_dtype=self.weight_dtype,
        )
        adapters = (self.lora or [], self.ip_adapter, self.clip_vision, self.ip_blocks, self.allow_download)
        return Stylizer(_adapted(backbone, *adapters), flow)

    def plan(self, engine: Stylizer, clip: Clip, options: StylizeOptions) -> MemoryPlan:
        """The plan within the budget asked for."""
        return engine.plan(clip, options, _bytes(self.memory_gb), _policy(self.memory_policy))


def takes_request(command: Callable) -> Callable:
    """Gives a command, beside its own options, those of RunRequest, which it gets as ``request``."""
    named = {f.name for f in fields(RunRequest)}

    @wraps(command)
    def called(**given: object) -> None:
        request = RunRequest(**{name: given.pop(name) for name in named})
        command(request=request, **given)

    asked = list(inspect.signature(RunRequest, eval_str=True).parameters.values())
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "request"]
    every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*asked, *own)]
    called.__signature__ = inspect.Signature(every)
    called.__annotations__ = {p.name: p.annotation for p in every}
    del called.__wrapped__
    return called


@app.command()
@takes_request
def stylize(
    request: RunRequest,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", "--output-dir", help="Folder for the result; made when missing.")
    ],
    codec: Annotated[
        str, typer.Option(help="h264, h265, vp9, av1, prores4444, ffv1, png, png16, gif or webp.")
    ] = "h264",
    crf: Annotated[int | None, typer.Option(help="Quality of the codec; lower is better.")] = None,
    bitrate: Annotated[int | None, typer.Option(help="Bits per second, in place of a quality.")] = None,
    deep: Annotated[bool, typer.Option(help="10 bits per colour where the codec can.")] = False,
    fusion: Annotated[
        str,
        typer.Option(
            help="How much each frame is mixed with the one before along the source's motion, 0 to 1: steadier, and "
            "closer to the source's own motion. off shows what the model made; auto is 1, but off at strength 0 and for "
            "models that attend over time themselves."
        ),
    ] = "auto",
    audio: Annotated[bool, typer.Option(help="Keep the video's audio.")] = True,
    keep_work: Annotated[
        bool, typer.Option("--keep_work", "--keep-work", help="Keep the latents beside the result.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Stylise a video. Run the same command again after a crash and it goes on where it stopped."""
    from .options import parse_fusion
    from .render import render, writer_settings
    from .video.audio import clip_audio
    from .video.codecs import OutputFormat
    from .video.writer import check_writable, result_name, try_settings

    options, fused, output = request.options(), parse_fusion(fusion), OutputFormat(codec, crf, bitrate, deep)
    clip, style = request.clip(), request.style()
    output_dir = _folder(output_dir)
    named = request.style_image[0].stem if request.style_image else "text"
    path = output_dir / result_name(clip.path.stem, named, output.suffix)
    _refuse_inputs(path, request)
    check_writable(path, output)
    sound = clip_audio(clip) if audio else None
    try_settings(path, audio=sound, **writer_settings(clip, output))
    engine = request.engine()
    plan = request.plan(engine, clip, options)
    for notice in clip.info.notices:
        _note(notice)
    with _Bars() as bars:
        latents = engine.denoise(clip, style, options, output_dir / ".veostyle", plan, bars)
        try:
            render(engine, latents, path, output, audio=sound, fusion=fused, monitor=bars)
        except BaseException:
            latents.store.close()
            raise
    for notice in latents.notices:
        _note(notice)
    latents.store.close() if keep_work else latents.store.remove()
    with contextlib.suppress(OSError):  # other runs may be there
        (output_dir / ".veostyle").rmdir()
    scenes = len(latents.survey.scenes)
    _say(
        f"{path}: {latents.survey.frames} frames, {float(latents.survey.duration):.2f} s, {scenes} scene{'s' * (scenes != 1)}"
    )


@app.command()
@takes_request
def plan(request: RunRequest, debug: Debug = False) -> None:
    """Show how much memory a run would take, without running it."""
    print(request.plan(request.engine(), request.clip(), request.options()).describe())


def _say(text: str, **style: object) -> None:
    """A line for a person, as it is: names of files may look like markup."""
    err.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, **style)


def _note(text: str) -> None:
    _say(f"note: {text}")


def _refuse_inputs(path: Path, request: RunRequest) -> None:
    from .errors import OutputError

    for given in (request.video_path, *(request.style_image or [])):
        if given.exists() and path.exists() and path.samefile(given):
            raise OutputError(f"{path} would replace the input of that name; choose another output folder")


@app.command()
def metrics(
    result: Annotated[Path, typer.Option(help="Stylised video.")],
    source: Annotated[Path, typer.Option(help="Video that it was made from.")],
    style_text: Annotated[
        str, typer.Option("--style_text", "--style-text", help="Words for the CLIP score; needs both encoders.")
    ] = "",
    clip_vision: ClipVision = None,
    clip_text: Annotated[
        str | None,
        typer.Option("--clip_text", "--clip-text", help="CLIP text encoder (safetensors), for the CLIP score."),
    ] = None,
    allow_download: AllowDownload = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Measure flicker, sharpness and structure of a result against its source."""
    from .errors import InputError
    from .metrics.clip_score import clip_score
    from .metrics.report import measure
    from .video.reader import open_clip

    if any((style_text, clip_vision, clip_text)) and not all((style_text, clip_vision, clip_text)):
        raise InputError("the CLIP score needs style_text, clip_vision and clip_text; give all three, or none")

    _, flow = _load(None, device)
    table = Table("metric", "value", "meaning")
    for row in measure(open_clip(result), open_clip(source), flow):
        table.add_row(row.name, f"{row.value:.5f}", row.meaning)
    if style_text:
        score = clip_score(open_clip(result), style_text, clip_vision, clip_text, allow_download)
        table.add_row("clip_score", f"{score:.5f}", "agreement of frames and words, -100..100")
    Console().print(table)


@app.command()
def doctor() -> None:
    """Show what this machine offers and what the pack makes of it."""
    from .doctor import findings

    table = Table("part", "state", "detail")
    for row in findings():
        table.add_row(*row)
    Console().print(table)


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Folder with content/, styles/, magenta/ and vgg19.safetensors.")],
    out: Annotated[Path, typer.Option(help="safetensors file to write.")],
    stages: Annotated[str, typer.Option(help="Stages in order with seconds, such as autoencoder:180,distil:170.")],
    resume: Annotated[Path | None, typer.Option(help="Weights to go on from.")] = None,
    size: Annotated[int, typer.Option(help="Side of the training pictures.")] = 256,
    batch: Annotated[int, typer.Option(help="Pictures in a step.")] = 16,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train veo-mini. Needs the extra `train`."""
    from .train.mini import parse_stages
    from .train.mini import train as run

    run(data, out, parse_stages(stages), _device(device), resume, size=size, batch=batch)


def _folder(path: Path) -> Path:
    from .errors import OutputError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(f"output_dir = {path} cannot be made ({e.strerror}); choose another folder") from e
    return path


def _bytes(gigabytes: float | None) -> int | None:
    from .errors import InputError

    if gigabytes is None:
        return None
    if not 0 < gigabytes < 1e6:
        raise InputError(f"memory_gb = {gigabytes:g} is out of range; give a number above 0, or leave it out")
    return int(gigabytes * 1e9)


def _policy(name: str) -> str:
    from .errors import InputError
    from .memory.plan import POLICIES

    if name not in POLICIES:
        raise InputError(f"memory_policy = {name} is unknown; give {' or '.join(POLICIES)}")
    return name


def _device(name: str):
    import torch

    from .errors import InputError

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise InputError(f"device = {name} is unknown; give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device = cuda, but this PyTorch sees no CUDA device; give cpu, or install a CUDA build of torch"
        )
    return torch.device(name)


def _load(model: Path | None, device: str, **settings: object):
    from .backbones import load_backbone
    from .motion.flow import load_flow

    where = _device(device)
    return load_backbone(model, where, **settings), load_flow(where)


def _adapted(backbone, loras: list[str], ip_adapter: Path | None, clip_vision: str | None, blocks: str, download: bool):
    """The backbone with what is put beside its weights; LoRA reports go to the terminal."""
    from .errors import InputError

    if (ip_adapter is None) != (clip_vision is None):
        raise InputError(f"ip_adapter = {ip_adapter}, clip_vision = {clip_vision}: the two go together; give both")
    if (loras or ip_adapter) and not hasattr(backbone, "with_lora"):
        raise InputError(
            f"model is {backbone.name}, which takes no LoRA and no IP-Adapter; give a checkpoint as --model"
        )
    if blocks not in ("all", "style"):
        raise InputError(f"ip_blocks = {blocks!r} is unknown; give all or style")
    for lora in loras:
        path, strength = _lora(lora)
        backbone = backbone.with_lora(path, strength)
        _say(backbone.loras[-1].report)
    if ip_adapter is not None:
        backbone = backbone.with_ip_adapter(ip_adapter, clip_vision, blocks, download)
        backbone.module.to(backbone.device)
    return backbone


def _lora(text: str) -> tuple[Path, float]:
    """``FILE`` or ``FILE:STRENGTH``; a colon in a file's own name is left alone."""
    path, _, strength = text.rpartition(":")
    try:
        return (Path(path), float(strength)) if path else (Path(text), 1.0)
    except ValueError:
        return Path(text), 1.0


class _Bars:
    """A bar and a line for each stage. A monitor for the engine."""

    def __init__(self):
        self.pace = Pace()
        self.bars = Bars(SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), console=err)
        self.tasks: dict[str, int] = {}

    def __enter__(self) -> _Bars:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def __call__(self, progress: Progress) -> None:
        shown = self.pace.seen(progress)
        if shown.stage not in self.tasks:
            self.tasks[shown.stage] = self.bars.add_task("")
        self.bars.update(
            self.tasks[shown.stage],
            description=self.pace.line(shown),
            completed=shown.done,
            total=shown.total or None,
        )


def main() -> None:
    """Entry point: a mistake of the user is one line and exit code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    debug = "--debug" in sys.argv
    try:
        # Typer turns Ctrl-C into an exit code of its own.
        if code := app(standalone_mode=False):
            err.print("interrupted; run the same command again to go on" if code == 130 else f"exit code {code}")
            sys.exit(code)
    except VeoError as e:
        if debug:
            raise
        _say(f"error: {e}", style="red")
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("interrupted; run the same command again to go on")
        sys.exit(130)
    except Exception as e:
        usage = getattr(e, "format_message", None)
        if usage is None or debug:
            raise
        _say(f"error: {usage()}", style="red")
        sys.exit(2)
