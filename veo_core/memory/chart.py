"""Pictures of memory: the plan as stacked bars, and a run's memory over time against it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..errors import InputError
from .plan import MemoryPlan
from .watch import RunMemory

WIDTH, MARGIN, ROW = 960, 32, 76
GB = 1e9
PAPER, INK, FAINT = "#16181d", "#e8e6e1", "#5b6069"
COLOURS = {"weights": "#6c8ebf", "cache": "#d9a441", "activations": "#5fa777", "reserve": "#3a3f48"}
STAGES = {"survey": "#8d93a0", "encode": "#6c8ebf", "denoise": "#5fa777", "decode": "#c9785d"}


def draw_plan(plan: MemoryPlan) -> Tensor:
    """A plan as one stacked bar a stage (weights, cache, activations) against the budget and the reserve beside it.

    Returns:
        float32 ``[H, 960, 3]`` in 0..1.
    """
    canvas = _Canvas(f"Memory plan: peak {_size(plan.peak)} of {_size(plan.budget)}", 150 + ROW * len(plan.stages))
    left, right = MARGIN + 110, WIDTH - MARGIN
    # Where the budget dwarfs the run, the bars are drawn to the run's scale and the budget's end is not shown.
    whole = min(plan.budget + plan.reserve, 3 * plan.peak)

    def x(size: float) -> float:
        return left + (right - left) * min(1.0, size / whole)

    shown = [name for name in COLOURS if name != "reserve" or plan.budget < whole]
    canvas.legend({name: COLOURS[name] for name in shown}, 64)
    for row, (stage, size) in enumerate(plan.stages.items()):
        top = 100 + row * ROW
        kept = min(size, plan.cache.get(stage, 0))
        canvas.text(MARGIN, top + 12, stage)
        canvas.box(left, top, right, top + 40, outline=FAINT)
        if plan.budget < whole:
            canvas.box(x(plan.budget), top, right, top + 40, COLOURS["reserve"])
        start = 0
        for part, bytes_ in (("weights", plan.weights), ("cache", kept), ("activations", size - kept)):
            canvas.box(x(start), top, x(start + bytes_), top + 40, COLOURS[part])
            start += bytes_
        canvas.text(min(x(start) + 8, right - 96), top + 12, _size(start))
    bottom = 100 + ROW * len(plan.stages) - 36
    if plan.budget <= whole:
        canvas.line([(x(plan.budget), 96), (x(plan.budget), bottom + 6)], "#d05f5f", 3)
    canvas.text(
        left,
        bottom + 18,
        f"{plan.device.type}: encodes {plan.encode_chunk}, decodes {plan.decode_chunk} frames at once",
    )
    label = f"budget {_size(plan.budget)}" + (", past the picture's edge" if plan.budget > whole else "")
    canvas.text(right - canvas.width(label), bottom + 18, label, "#d05f5f")
    return canvas.pixels()


def draw_report(memory: RunMemory) -> Tensor:
    """Memory over time as it was measured, coloured by stage, with each stage's planned peak as a dashed line.

    Args:
        memory: of a run, with its plan and traces.

    Returns:
        float32 ``[H, 960, 3]`` in 0..1.

    Raises:
        InputError: nothing was measured.
    """
    if memory.plan is None or not memory.peaks:
        raise InputError(
            "memory holds nothing measured yet; connect the memory output of VAE Decode to Video (VeoStyle)"
        )
    plan, peaks = memory.plan, memory.peaks
    canvas = _Canvas("Memory: planned and measured", 470 + 26 * len(peaks))
    left, right, top, bottom = MARGIN + 80, WIDTH - MARGIN, 100, 400
    planned = {s: plan.weights + size for s, size in plan.stages.items()}
    highest = 1.1 * max([*peaks.values(), *planned.values()])
    shifted, offset = [], 0.0
    for trace in memory.traces:
        shifted += [(offset + t, stage, size) for t, stage, size in trace.samples]
        offset = shifted[-1][0] if shifted else 0.0
    length = max(offset, 1e-3)

    def at(seconds: float, size: float) -> tuple[float, float]:
        return left + (right - left) * seconds / length, bottom - (bottom - top) * max(0.0, size) / highest

    canvas.legend({s: STAGES.get(s, FAINT) for s in peaks}, 64)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - (bottom - top) * share
        canvas.line([(left, y), (right, y)], "#2a2e35")
        canvas.text(MARGIN, y - 9, _size(highest * share))
    for stage, size in planned.items():
        y = at(0, size)[1]
        for dash in range(int(left), int(right), 14):
            canvas.line([(dash, y), (dash + 7, y)], STAGES[stage], 2)
    for (t0, _, a), (t1, stage, b) in pairwise(shifted):
        canvas.line([at(t0, a), at(t1, b)], STAGES.get(stage, FAINT), 3)
    canvas.text(left, bottom + 10, "0 s")
    end = f"{length:.1f} s"
    canvas.text(right - canvas.width(end), bottom + 10, end)
    for row, line in enumerate(memory.describe().splitlines()):
        canvas.text(left, bottom + 46 + 26 * row, line)
    return canvas.pixels()


def _size(size: float) -> str:
    return f"{size / GB:.2f} GB"


class _Canvas:
    """A dark sheet with a title; positions in pixels."""

    def __init__(self, title: str, height: int):
        self.image = Image.new("RGB", (WIDTH, height), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(17)
        self.draw.text((MARGIN, 20), title, INK, ImageFont.load_default(24))

    def text(self, x: float, y: float, text: str, colour: str = INK) -> None:
        self.draw.text((x, y), text, colour, self.font)

    def width(self, text: str) -> float:
        return self.draw.textlength(text, self.font)

    def box(
        self, left: float, top: float, right: float, bottom: float, fill: str | None = None, outline: str | None = None
    ):
        if right > left:
            self.draw.rectangle((left, top, right, bottom), fill, outline)

    def line(self, points: list[tuple[float, float]], colour: str, width: int = 1) -> None:
        self.draw.line(points, colour, width)

    def legend(self, entries: dict[str, str], y: int) -> None:
        x = float(MARGIN)
        for name, colour in entries.items():
            self.box(x, y + 2, x + 14, y + 16, colour)
            self.text(x + 22, y, name)
            x += 44 + self.width(name)

    def pixels(self) -> Tensor:
        return torch.from_numpy(np.array(self.image)).float() / 255
