"""Types that the pack's nodes exchange on the canvas, beside ComfyUI's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

if TYPE_CHECKING:
    from ..veo_core.backbones import Backbone
    from ..veo_core.engine import Stylizer
    from ..veo_core.video.audio import AudioTrack

CATEGORY = "VeoStyle"
VeoClip = io.Custom("VEO_CLIP")
VeoStyle = io.Custom("VEO_STYLE")
VeoModel = io.Custom("VEO_MODEL")


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

    def budget(self) -> int:
        """Bytes that a run may take: all of the device's memory less a reserve, since ComfyUI makes room on demand."""
        import comfy.model_management

        from ..veo_core.memory.plan import RESERVE

        device = comfy.model_management.get_torch_device()
        return int(comfy.model_management.get_total_memory(device) * (1 - RESERVE))


def patcher_of(module: Any) -> Any:
    """What ComfyUI moves a network between devices by."""
    import comfy.model_management as management
    import comfy.model_patcher

    wrap = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return wrap(module, load_device=management.get_torch_device(), offload_device=management.unet_offload_device())


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
