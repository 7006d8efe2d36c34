"""Types that the pack's nodes exchange on the canvas, beside ComfyUI's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

if TYPE_CHECKING:
    from ..veo_core.backbones import Backbone
    from ..veo_core.engine import Stylizer
    from ..veo_core.memory.plan import MemoryPlan
    from ..veo_core.memory.watch import RunMemory
    from ..veo_core.options import StylizeOptions
    from ..veo_core.video.audio import AudioTrack, Waveform
    from ..veo_core.video.reader import Clip

CATEGORY = "VeoStyle"
VeoClip = io.Custom("VEO_CLIP")
VeoStyle = io.Custom("VEO_STYLE")
VeoModel = io.Custom("VEO_MODEL")
VeoMemory = io.Custom("VEO_MEMORY")


def schema(search_aliases: list[str], **settings: Any) -> io.Schema:
    """A node's schema in the pack's category; what only newer cores know is left out on older ones."""
    if "search_aliases" in inspect.signature(io.Schema).parameters:
        settings["search_aliases"] = search_aliases
    return io.Schema(category=CATEGORY, **settings)


def run_options(
    preset: str,
    inversion: bool,
    knobs: str,
    steps: int,
    guidance: float,
    strength: float,
    *,
    denoise: float,
    window: int,
    overlap: int,
    **more: Any,
) -> StylizeOptions:
    """Options of a run from widgets, whose 0, and for overlap -1, leaves a choice to the model."""
    from ..veo_core.options import parse_options

    return parse_options(
        preset,
        inversion,
        knobs,
        steps=steps or None,
        guidance=guidance or None,
        strength=strength,
        denoise=denoise or None,
        window=window or None,
        overlap=None if overlap < 0 else overlap,
        **more,
    )


def fixed_control() -> Any:
    """The control of a seed that stays as it is until somebody says otherwise; a plain one on cores that know no other."""
    kinds = getattr(io, "ControlAfterGenerate", None)
    return True if kinds is None else kinds.fixed


def valid(check: Callable[..., object], *values: Any, **named: Any) -> bool | str:
    """True, or what ``check`` has against these values; not called where another node gives one of them."""
    from ..veo_core.errors import VeoError

    if any(value is None for value in (*values, *named.values())):
        return True
    try:
        check(*values, **named)
    except VeoError as e:
        return str(e)
    return True


@dataclass
class LoadedModel:
    """What VEO_MODEL carries: an engine, and the patchers by which ComfyUI moves its networks between devices."""

    engine: Stylizer
    patchers: list[Any]

    def to_device(self, memory_required: int) -> None:
        """Has ComfyUI put the networks on its device, beside whatever else is there; whole, as plain modules must be."""
        import comfy.model_management

        comfy.model_management.load_models_gpu(self.patchers, memory_required=memory_required, force_full_load=True)

    def with_backbone(self, backbone: Backbone, modules: Iterable[Any] = ()) -> LoadedModel:
        """The same networks under another backbone, with some more to move."""
        return LoadedModel(self.engine.with_backbone(backbone), [*self.patchers, *map(patcher_of, modules)])

    def plan(self, clip: Clip, options: StylizeOptions, memory: RunMemory) -> MemoryPlan:
        """The plan of a run. All of a GPU's memory counts as free, since ComfyUI makes room there on demand."""
        import comfy.model_management as management

        self.to_device(0)
        device = management.get_torch_device()
        free = None if device.type == "cpu" else int(management.get_total_memory(device))
        return self.engine.plan(clip, options, memory.budget, memory.policy, free)


def patcher_of(module: Any) -> Any:
    """What ComfyUI moves a network between devices by."""
    import comfy.model_management as management
    import comfy.model_patcher

    wrap = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return wrap(module, load_device=management.get_torch_device(), offload_device=management.unet_offload_device())


def track_of(audio: Any) -> AudioTrack | Waveform | None:
    """An AUDIO as the engine takes it; what was read from a file stays there."""
    if isinstance(audio, LazyAudio) or audio is None:
        return audio and audio.track
    from ..veo_core.video.audio import Waveform

    return Waveform(audio["waveform"][0].float().cpu().numpy(), audio["sample_rate"])


class LazyAudio(Mapping):
    """ComfyUI's AUDIO, decoded when first read: ``waveform`` float32 ``[1, channels, n]`` and ``sample_rate``."""

    def __init__(self, track: AudioTrack):
        self.track = track
        self._decoded: dict[str, Any] | None = None

    def _read(self) -> dict[str, Any]:
        if self._decoded is None:
            import torch

            from ..veo_core.video.audio import read_waveform

            waveform = read_waveform(self.track)
            self._decoded = {"waveform": torch.from_numpy(waveform.samples)[None], "sample_rate": waveform.rate}
        return self._decoded

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self):
        return iter(("waveform", "sample_rate"))

    def __len__(self) -> int:
        return 2
