"""Prompts along a clip: one for all of it, others for scenes and key frames."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ..errors import InputError
from ..video.scenes import Survey

MAX_LENGTH = 20_000
_MARK = re.compile(r"@\s*(?:(scene)\s+(\d+)|(?:(frame)\s+)?(\d+(?:\.\d+)?)(s?))(?=[\s:]|$)\s*:?\s*(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Prompts:
    """What is asked for in words, and when.

    Attributes:
        text: for the whole clip; scenes' and key frames' words are added to it.
        scenes: words by scene, from 1.
        keys: words at key frames, ``(frame, words)``, or at seconds, ``(Fraction, words)``. Between two of them the
            words change gradually; before the first and after the last they hold.
        negative: what is not wanted.
    """

    text: str = ""
    scenes: tuple[tuple[int, str], ...] = ()
    keys: tuple[tuple[int | Fraction, str], ...] = ()
    negative: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.scenes or self.keys)

    def checked(self, survey: Survey) -> Prompts:
        """The same with all key frames as frame numbers, in order. Raises InputError for what lies outside the clip."""
        if beyond := [n for n, _ in self.scenes if n > len(survey.scenes)]:
            raise InputError(f"prompt for @scene {beyond[0]}: the clip has {len(survey.scenes)} scene(s); lower it")
        keys = []
        for at, words in self.keys:
            frame = at if isinstance(at, int) else sum(t <= at for t in survey.times) - 1
            if frame >= survey.frames or (isinstance(at, Fraction) and at > survey.duration):
                mark = f"@{at}" if isinstance(at, int) else f"@{float(at):g}s"
                raise InputError(
                    f"prompt for {mark}: the clip has {survey.frames} frames, "
                    f"{float(survey.duration):.2f} s; give a place inside it"
                )
            keys.append((frame, words))
        # Of two at one frame the later line holds.
        return Prompts(self.text, self.scenes, tuple(sorted(dict(keys).items())), self.negative)

    def at(self, frame: int, scene: int) -> list[tuple[str, float]]:
        """The texts that hold at a frame, with shares that sum to 1.

        Args:
            frame: absolute index. scene: index of its scene, from 0.
        """
        base = [self.text, *(words for n, words in self.scenes if n == scene + 1)]
        return [(", ".join(filter(None, [*base, words])), share) for words, share in self._between(frame)]

    def texts(self, survey: Survey) -> list[tuple[str, int]]:
        """Every text that occurs in a clip with its scene, the negative and the empty one included, in a fixed order."""
        found = set()
        for index, scene in enumerate(survey.scenes):
            frames = (scene.anchor, *range(scene.start, scene.end)) if self.keys else (scene.start,)
            found |= {(text, index) for frame in frames for text, _ in self.at(frame, index)}
            found |= {("", index), (self.negative, index)}
        return sorted(found)

    def _between(self, frame: int) -> list[tuple[str, float]]:
        if not self.keys:
            return [("", 1.0)]
        after = next((i for i, (at, _) in enumerate(self.keys) if at >= frame), None)
        if after is None:
            return [(self.keys[-1][1], 1.0)]
        if after == 0 or self.keys[after][0] == frame:
            return [(self.keys[after][1], 1.0)]
        (begin, first), (end, second) = self.keys[after - 1 : after + 1]
        share = (frame - begin) / (end - begin)
        return [(first, 1 - share), (second, share)]


def join_prompts(parts: list[tuple[Prompts, float]]) -> Prompts:
    """Prompts of several styles as one, each style's words weighing as given; key frames of all are kept."""

    def weigh(words: str, weight: float) -> str:
        return words if not words or abs(weight - 1) < 1e-3 else f"({words}:{weight:.3g})"

    def joined(texts: list[str]) -> str:
        return ", ".join(dict.fromkeys(filter(None, texts)))

    scenes: dict[int, list[str]] = {}
    for prompts, weight in parts:
        for number, words in prompts.scenes:
            scenes.setdefault(number, []).append(weigh(words, weight))
    return Prompts(
        joined([weigh(p.text, w) for p, w in parts]),
        tuple((n, joined(words)) for n, words in sorted(scenes.items())),
        tuple((at, weigh(words, w)) for p, w in parts for at, words in p.keys),
        joined([p.negative for p, _ in parts]),
    )


def parse_prompts(text: str, negative: str = "") -> Prompts:
    """Reads prompts as people write them: one line for the clip, and lines that begin with a mark.

    ``@scene 2 at night`` holds in the second scene, ``@48 at dawn`` at frame 48, ``@2.5s at dawn`` at 2.5 seconds.
    Words in brackets weigh as given: ``(running:1.3)``.

    Raises:
        InputError: names a line that begins with a mark that is none of these, or a text that is too long.
    """
    if len(text) + len(negative) > MAX_LENGTH:
        raise InputError(f"prompt of {len(text) + len(negative):,} characters is too long; {MAX_LENGTH:,} are read")
    common, scenes, keys = [], {}, []
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("@"):
            common.append(line)
            continue
        mark = _MARK.fullmatch(line)
        if mark is None or (mark[4] and "." in mark[4] and not mark[5]) or (mark[3] and mark[5]) or mark[2] == "0":
            raise InputError(f"prompt line {line[:60]!r}: begin with @scene 2, @48 (a frame) or @2.5s, then the words")
        if mark[1]:
            scenes[int(mark[2])] = mark[6]
        else:
            keys.append((Fraction(mark[4]) if mark[5] else int(mark[4]), mark[6]))
    return Prompts(" ".join(common), tuple(sorted(scenes.items())), tuple(keys), negative.strip())


_WEIGHTED = re.compile(r"\\[()]|\(|:\s*([+-]?\d*\.?\d+)\s*\)|\)|[^\\():]+|[:\\]")


def weighted_parts(text: str) -> list[tuple[str, float]]:
    """Splits ``a (fast:1.3) cat`` into parts with weights; plain brackets weigh 1.1, ``\\(`` is a bracket itself.

    The syntax is that of ComfyUI and of the web UIs before it.
    """
    parts: list[list] = []
    opened: list[int] = []

    def scale(since: int, weight: float) -> None:
        for part in parts[since:]:
            part[1] *= weight

    for match in _WEIGHTED.finditer(text):
        token = match[0]
        if token == "(":
            opened.append(len(parts))
        elif match[1] and opened:
            scale(opened.pop(), float(match[1]))
        elif token == ")" and opened:
            scale(opened.pop(), 1.1)
        else:
            parts.append([token[1:] if token[0] == "\\" and len(token) == 2 else token, 1.0])
    for since in opened:
        parts.insert(since, ["(", 1.0])
    merged: list[list] = []
    for words, weight in parts:
        if merged and merged[-1][1] == weight:
            merged[-1][0] += words
        else:
            merged.append([words, weight])
    return [(words, weight) for words, weight in merged if words]
