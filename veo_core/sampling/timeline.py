"""Latent frames and the frames they stand for: one for one, or by the causal grouping of video autoencoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..video.scenes import Scene

# Latent frames that a causal autoencoder is given before those it is asked for, and that it decodes together. They belong
# to the result, as windows do: other numbers give other bits.
CONTEXT, GROUP = 2, 4


@dataclass(frozen=True)
class Timeline:
    """Maps frames to latent frames, scene by scene.

    With a time factor r, a scene's first frame is a latent frame of its own, and each r frames after it share one; the last
    group is filled up with its last frame. With r = 1 both counts are the same.

    Attributes:
        frame_scenes: scenes in frames. factor: r.
    """

    frame_scenes: tuple[Scene, ...]
    factor: int = 1

    @cached_property
    def scenes(self) -> tuple[Scene, ...]:
        """The same scenes in latent frames."""
        starts, at = {}, 0
        for scene in self.frame_scenes:
            starts[scene.start] = at
            at += self.latents(scene.end - scene.start)
        ends = [*list(starts.values())[1:], at]
        return tuple(
            Scene(starts[s.start], end, starts[s.anchor]) for s, end in zip(self.frame_scenes, ends, strict=True)
        )

    @property
    def total(self) -> int:
        """Latent frames in all."""
        return self.scenes[-1].end

    def latents(self, frames: int) -> int:
        """Latent frames that so many frames from a scene's start take."""
        return 1 + -(-(frames - 1) // self.factor)

    def scene_of(self, latent: int) -> int:
        """Index of the scene that a latent frame lies in."""
        return next(i for i, s in enumerate(self.scenes) if latent < s.end)

    def frame(self, latent: int) -> int:
        """The first frame that a latent frame stands for; for a scene's end, the scene's end."""
        scene = self.scene_of(min(latent, self.total - 1))
        frames, offset = self.frame_scenes[scene], latent - self.scenes[scene].start
        return frames.start if offset == 0 else min(frames.start + (offset - 1) * self.factor + 1, frames.end)

    def end_frame(self, latent: int) -> int:
        """One past the last frame that the latent frame before ``latent`` stands for."""
        scene = self.scene_of(latent - 1)
        frames, offset = self.frame_scenes[scene], latent - 1 - self.scenes[scene].start
        return min(frames.start + offset * self.factor + 1, frames.end)

    def latent(self, frame: int) -> int:
        """The latent frame that a frame lies in."""
        at = next(i for i, s in enumerate(self.frame_scenes) if frame < s.end)
        return self.scenes[at].start + self.latents(frame - self.frame_scenes[at].start + 1) - 1

    def group(self, frame: int) -> tuple[int, int]:
        """The frames decoded together with a frame: a run of latent frames on a grid from its scene's start."""
        scene = self.scenes[self.scene_of(self.latent(frame))]
        first = scene.start + (self.latent(frame) - scene.start) // GROUP * GROUP
        return self.frame(first), self.end_frame(min(first + GROUP, scene.end))

    def known_from(self, latent: int) -> int:
        """The first frame that must be known before a latent frame inside a scene: for its flow, and for its context."""
        if self.factor == 1:
            return self.frame(latent) - 1
        return self.end_frame(self.context(latent) + 1) - 1

    def context(self, latent: int) -> int:
        """The latent frame from which a causal autoencoder must begin so that ``latent`` comes out as in a long clip."""
        if self.factor == 1:
            return latent
        return max(self.scenes[self.scene_of(latent)].start, latent - CONTEXT)
