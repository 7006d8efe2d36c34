"""What feeds a window of the denoiser: the clip read forward, encoded and measured, and what the window before left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from .backbones.base import Backbone
from .cuda_graphs import CudaGraphs, fill
from .errors import InputError
from .memory.plan import padded_size
from .motion.flow import FlowNet
from .motion.fusion import estimate_motion, latent_motion
from .sampling.sampler import WindowState
from .sampling.timeline import Timeline
from .sampling.windows import Window
from .store import RunStore
from .transfer import put
from .video.reader import Clip, Frame


@dataclass
class RunState:
    """How far denoising has come, and what the next window takes over."""

    window: int
    carried: WindowState
    content: Tensor | None = None
    motion: Tensor | None = None

    @classmethod
    def load(cls, store: RunStore, device: torch.device) -> RunState:
        saved = store.load_state("denoise")
        if saved is None:
            return cls(0, WindowState())
        tensors, facts = saved
        tensors = {k: v.to(device) for k, v in tensors.items()}
        moments = {k.removeprefix("moments."): v for k, v in tensors.items() if k.startswith("moments.")}
        carried = WindowState(tensors.get("shared"), moments)
        return cls(int(facts["window"]), carried, tensors.get("content"), tensors.get("motion"))


class WindowFeed:
    """Reads the clip forward and gives each window its content latents, motion and anchor.

    Frames that two windows share are encoded once; a resumed run takes them from what was saved.
    """

    def __init__(
        self,
        backbone: Backbone,
        flow: FlowNet,
        clip: Clip,
        store: RunStore,
        timeline: Timeline,
        state: RunState,
        chunk: int,
        window: Window,
        graphs: CudaGraphs,
    ):
        self.backbone, self.flow, self.store, self.timeline = backbone, flow, store, timeline
        # A causal autoencoder's result depends on what it is given together: there it is the window.
        self.chunk = chunk if timeline.factor == 1 else None
        self.graphs = graphs
        self._anchor: dict[int, Tensor] = {}
        self.content, self.motion = state.content, state.motion
        self.next = window.start + window.shared
        first = timeline.frame(self.next)
        begins_scene = self.next == window.scene.start
        seen = first if begins_scene else timeline.known_from(self.next)
        self.frames: Iterator[Frame] = clip.frames(first=seen, device=self.backbone.device)
        # The last frames read: what the flow, and a causal autoencoder, must know before the next ones.
        self.before = [self._image(f) for f in islice(self.frames, first - seen)]

    def close(self) -> None:
        self.frames.close()

    def _image(self, frame: Frame) -> Tensor:
        """``[1, 3, H, W]`` on the device, its far edges repeated up to what the model can take."""
        h, w = frame.image.shape[-2:]
        width, height = padded_size((w, h), self.backbone.multiple)
        image = frame.image[None]
        return image if (w, h) == (width, height) else F.pad(image, (0, width - w, 0, height - h), mode="replicate")

    def advance(self, window: Window, before_chunk: Callable[[int], None]) -> tuple[Tensor, Tensor | None]:
        """Content latents ``[n, C, h, w]`` of a window, and motion ``[n + 1, 3, h, w]`` in latent pixels.

        ``before_chunk`` is told how many frames of the clip are encoded.

        In the batch the anchor stands before the window's first frame; no motion leads from one to the other.
        """
        if not window.shared:
            self.content = self.motion = None
        while self.next < window.end:
            before_chunk(self.timeline.frame(self.next))
            self._take(window, min(self.chunk or window.end, window.end - self.next))
        if window.start == window.scene.start == window.scene.anchor:
            self._anchor = {window.scene.anchor: self.content[:1].clone(memory_format=torch.contiguous_format)}
            self.store.save_state(f"anchor-{window.scene.anchor}", {"content": self.content[:1]})
        if self.timeline.factor > 1:
            return self.content, None
        motion = latent_motion(self.motion, self.content.shape[-2:])
        return self.content, torch.cat([torch.zeros_like(motion[:1]).expand(2, -1, -1, -1), motion[1:]])

    def _take(self, window: Window, count: int) -> None:
        """Reads, measures and encodes the frames of the next ``count`` latent frames."""
        first, end = self.timeline.frame(self.next), self.timeline.end_frame(self.next + count)
        images = [self._image(f) for f in islice(self.frames, end - first)]
        if len(images) < end - first:
            raise InputError(f"the video changed while it was read: frame {first + len(images)} is gone; run again")
        starts_scene = self.next == window.scene.start
        if starts_scene:
            self.before = []
        batch = torch.cat([images[0] if starts_scene else self.before[-1], *images])
        motion, content = self._encoded(batch)
        if starts_scene:
            motion[0] = 0
        self.store.write("motion", first, motion)
        content = content[-count:]
        self.content = content if self.content is None else torch.cat([self.content, content])
        if self.timeline.factor == 1:
            self.motion = motion if self.motion is None else torch.cat([self.motion, motion])
        self.next += count
        known = self.timeline.known_from(self.next) if self.next < window.scene.end else end - 1
        self.before = [*self.before, *images][known - end :]

    def _encoded(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Motion and content latents of frames but the first, ``[n + 1, 3, H, W]``."""

        def encode(frames: Tensor) -> tuple[Tensor, Tensor]:
            return estimate_motion(self.flow, frames), self.backbone.encode(frames[1:])

        if self.timeline.factor > 1:
            return estimate_motion(self.flow, frames), self._encode_groups(frames[1:])
        count = len(frames) - 1
        if self.graphs.enabled:
            frames = fill(frames, self.chunk + 1)
        # Copies: the next call writes over what a graph gave.
        return tuple(x[:count].clone() for x in self.graphs("encode", encode, frames))

    def _encode_groups(self, batch: Tensor) -> Tensor:
        factor = self.timeline.factor
        batch = torch.cat([*self.before, batch])
        missing = -(len(batch) - 1) % factor
        return self.backbone.encode(torch.cat([batch, batch[-1:].expand(missing, -1, -1, -1)]))

    def anchor(self, window: Window) -> Tensor:
        """Content latent ``[1, C, h, w]`` of the scene's anchor frame, of this scene or of the one it returns to."""
        frame = window.scene.anchor
        if frame not in self._anchor:
            tensors, _ = self.store.load_state(f"anchor-{frame}")
            self._anchor = {frame: put(tensors["content"], self.backbone.device)}
        return self._anchor[frame]

    def save(self, state: RunState, window: Window) -> None:
        """Records that a window is done, with what the next one takes over."""
        tensors: dict[str, Tensor] = {}
        if not window.last:
            keep = state.carried.overlap
            self.content = self.content[len(self.content) - keep :]
            tensors = {"shared": state.carried.shared, "content": self.content}
            if self.motion is not None:
                self.motion = self.motion[len(self.motion) - keep :]
                tensors["motion"] = self.motion
            tensors |= {f"moments.{k}": v for k, v in state.carried.moments.items()}
        else:
            state.carried = WindowState()
        self.store.save_state("denoise", tensors, window=state.window)
