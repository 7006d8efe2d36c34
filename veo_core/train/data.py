"""Training data made on the device: picture banks, random crops, and clips with exact motion."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from torch import Tensor

from ..errors import InputError
from ..motion.warp import pixel_grid, sample_at

SIDE = 320


def load_bank(files: list[Path], device: torch.device, side: int = SIDE) -> Tensor:
    """Square crops of pictures, short side scaled to ``side``; a long picture gives one crop at each end.

    Returns:
        uint8 ``[n, 3, side, side]`` on ``device``.
    """

    def crops(path: Path) -> list[np.ndarray]:
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            scale = side / min(picture.size)
            size = [max(side, round(s * scale)) for s in picture.size]
            pixels = np.asarray(picture.resize(size, Image.Resampling.LANCZOS))
        ends = [pixels[:side, :side]]
        if max(size) > 1.25 * side:
            ends.append(pixels[-side:, -side:])
        return ends

    if not files:
        raise InputError(
            "no training pictures were found; name a folder that holds content/ and styles/ with .jpg files"
        )
    with ThreadPoolExecutor() as pool:
        pictures = [c for found in pool.map(crops, files) for c in found]
    return torch.from_numpy(np.stack(pictures)).movedim(-1, 1).contiguous().to(device)


@dataclass
class StyleBank:
    """Style pictures and the cumulative probability of drawing each. Nothing here waits for the device."""

    pictures: Tensor
    cumulative: Tensor

    @classmethod
    def load(cls, folder: Path, content: Tensor, held_out: frozenset[str], device: torch.device) -> StyleBank:
        """Paintings (``art_*``) take 70 % of the draws, clip art 8 %, content pictures the rest."""
        files = sorted(f for f in (folder / "styles").glob("*.jpg") if f.stem not in held_out)
        art = load_bank([f for f in files if f.name.startswith("art_")], device)
        clip_art = load_bank([f for f in files if not f.name.startswith("art_")], device)
        banks = ((art, 0.70), (clip_art, 0.08), (content, 0.22))
        weights = torch.cat([torch.full((len(b),), w / len(b), device=device) for b, w in banks])
        return cls(torch.cat([b for b, _ in banks]), weights.cumsum(0) / weights.sum())

    def draw(self, count: int, size: int) -> Tensor:
        """Random crops ``[count, 3, size, size]`` in 0..1."""
        index = torch.searchsorted(self.cumulative, torch.rand(count, device=self.cumulative.device))
        index = index.clamp(max=len(self.pictures) - 1)
        return random_crops(self.pictures[index], size)


def random_crops(pictures: Tensor, size: int, zoom: tuple[float, float] = (0.75, 1.0)) -> Tensor:
    """Random square crops, half of them mirrored; ``pictures`` uint8 ``[n, 3, S, S]`` -> ``[n, 3, size, size]``."""
    n, _, side, _ = pictures.shape
    device = pictures.device
    scale = torch.empty(n, device=device).uniform_(*zoom) * side / size
    offset = torch.rand(n, 2, device=device) * (side - scale * size)[:, None]
    grid = pixel_grid(size, size, device)
    mirror = torch.rand(n, device=device) < 0.5
    x = torch.where(mirror[:, None, None], size - 1 - grid[0], grid[0])
    positions = (
        torch.stack([x, grid[1].expand(n, -1, -1)], dim=1) * scale[:, None, None, None] + offset[..., None, None]
    )
    return sample_at(pictures.float() / 255, positions)


def draw(bank: Tensor, count: int, size: int) -> Tensor:
    """``count`` random crops from a uint8 bank, in 0..1."""
    return random_crops(bank[torch.randint(len(bank), (count,), device=bank.device)], size)


@dataclass
class SyntheticClips:
    """Clips whose motion is known exactly.

    Attributes:
        frames: ``[b, t, 3, H, W]`` in 0..1.
        flow: ``[b, t, 2, H, W]``, from each frame to the one before, pixels; zero at the first.
        visible: ``[b, t, 1, H, W]``, 1 where that match is seen.
        anchor_flow, anchor_visible: the same, to the first frame.
    """

    frames: Tensor
    flow: Tensor
    visible: Tensor
    anchor_flow: Tensor
    anchor_visible: Tensor


def _affine(angle: Tensor, log_scale: Tensor, shift: Tensor, centre: float) -> Tensor:
    """``[..., 2, 3]`` maps of output pixels to picture pixels about the centre of both."""
    c, s, z = angle.cos(), angle.sin(), log_scale.exp()
    rows = torch.stack([torch.stack([z * c, -z * s], -1), torch.stack([z * s, z * c], -1)], -2)
    middle = shift.new_full((2,), centre)
    translation = shift + middle - (rows @ middle[:, None])[..., 0]
    return torch.cat([rows, translation[..., None]], -1)


def _inverse(matrix: Tensor) -> Tensor:
    """Inverse of affine ``[..., 2, 3]`` maps, in closed form: a solver would wait for the device."""
    a, b, c, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 0], matrix[..., 1, 1]
    rows = torch.stack([torch.stack([d, -b], -1), torch.stack([-c, a], -1)], -2) / (a * d - b * c)[..., None, None]
    return torch.cat([rows, -rows @ matrix[..., 2:]], -1)


def _trajectory(b: int, t: int, size: int, speed: Tensor, device: torch.device) -> Tensor:
    """Smooth affine motion ``[b, t, 2, 3]``; ``speed [b]`` in pixels a frame."""
    room = (SIDE - size) / 2
    start = (torch.rand(b, 2, device=device) * 2 - 1) * room * 0.7
    direction = torch.randn(b, 2, device=device)
    velocity = direction / direction.norm(dim=1, keepdim=True) * speed[:, None]
    turn = torch.randn(b, device=device) * speed * 0.003
    zoom = torch.randn(b, device=device) * speed * 0.003
    time = torch.arange(t, device=device, dtype=torch.float32)
    shift = start[:, None] + velocity[:, None] * time[None, :, None]
    base_zoom = torch.empty(b, device=device).uniform_(-0.25, 0.1)
    base_turn = torch.randn(b, device=device) * 0.1
    angle, scale = base_turn[:, None] + turn[:, None] * time, base_zoom[:, None] + zoom[:, None] * time
    return _affine(angle, scale, shift + room, (size - 1) / 2)


def _apply(matrix: Tensor, points: Tensor) -> Tensor:
    """``matrix [n, 2, 3]`` on ``points [n, 2, H, W]``."""
    return torch.einsum("nij,njhw->nihw", matrix[:, :2, :2], points) + matrix[:, :2, 2, None, None]


def synthetic_clips(bank: Tensor, b: int, t: int, size: int, top_speed: float, still: float = 0.25) -> SyntheticClips:
    """Clips of a moving background and, in half of them, a moving shape in front, drawn on the device of ``bank``.

    Args:
        bank: uint8 pictures ``[n, 3, SIDE, SIDE]``.
        top_speed: largest speed in pixels a frame; speeds are skewed to the slow side.
        still: share of layers that do not move.
    """
    device = bank.device
    pictures = bank[torch.randint(len(bank), (2 * b,), device=device)].float() / 255
    speed = top_speed * torch.rand(2, b, device=device).square() * (torch.rand(2, b, device=device) >= still)
    back, front = (_trajectory(b, t, size, s, device) for s in speed)
    noise = F.interpolate(torch.randn(b, 1, 6, 6, device=device), (SIDE, SIDE), mode="bicubic", align_corners=False)
    present = (torch.rand(b, 1, 1, 1, device=device) < 0.5).float()
    shape = torch.sigmoid((noise - 0.5) * 12) * present

    grid = pixel_grid(size, size, device).expand(b * t, -1, -1, -1)
    every = lambda x: x.repeat_interleave(t, 0)  # noqa: E731
    back_m, front_m = back.flatten(0, 1), front.flatten(0, 1)
    scene = sample_at(every(pictures[:b]), _apply(back_m, grid), padding="reflection")
    thing = sample_at(every(torch.cat([pictures[b:], shape], 1)), _apply(front_m, grid), padding="border")
    cover = thing[:, 3:]
    frames = torch.lerp(scene, thing[:, :3], cover)

    def to(reference: Tensor) -> tuple[Tensor, Tensor]:
        """Flow and visibility of every frame towards frame ``reference[t]`` of its clip."""
        flows, seen = [], []
        target = rearrange(cover, "(b t) c h w -> b t c h w", t=t)[:, reference].flatten(0, 1)
        for matrix, inside in ((back, lambda m: 1 - m), (front, lambda m: m)):
            there = _apply(_inverse(matrix[:, reference]).flatten(0, 1), _apply(matrix.flatten(0, 1), grid))
            in_frame = ((there >= 0) & (there <= size - 1)).all(1, keepdim=True)
            seen.append(((inside(sample_at(target, there)) > 0.9) & (inside(cover) > 0.9) & in_frame).float())
            flows.append(there - grid)
        flow = torch.where(cover > 0.5, flows[1], flows[0])
        return flow.unflatten(0, (b, t)), torch.maximum(*seen).unflatten(0, (b, t))

    order = torch.arange(t, device=device)
    flow, visible = to((order - 1).clamp(min=0))
    anchor_flow, anchor_visible = to(torch.zeros_like(order))
    return SyntheticClips(frames.unflatten(0, (b, t)), flow, visible, anchor_flow, anchor_visible)


def exposure_and_noise(frames: Tensor, drift: float = 0.03, noise: float = 0.03) -> Tensor:
    """``frames [b, t, 3, H, W]`` with a gain that wanders from frame to frame and sensor noise of random strength."""
    b, t = frames.shape[:2]
    gain = 1 + drift * torch.randn(b, t, 1, 1, 1, device=frames.device)
    level = noise * torch.rand(b, 1, 1, 1, 1, device=frames.device).square()
    return (frames * gain + level * torch.randn_like(frames)).clamp(0, 1)
