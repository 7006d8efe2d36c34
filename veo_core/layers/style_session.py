"""Training-free style: what the attention and norm sites of a model do while one window is denoised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ...kernels.cross_frame_attention import apply_affine, cross_frame_attention, gathered
from ...kernels.st_norm import affine_act, channel_moments
from ..errors import InputError
from ..memory.trace import declare_cache
from ..motion.fusion import latent_motion
from ..motion.warp import warped_neighbourhood
from ..style.injection import StyleInjection, trapezoid
from .cross_frame_attention import source_table
from .st_norm import TemporalContext, calibration, frame_moments

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendAcross = Callable[..., Tensor]
# Queries, keys and values of style pictures, and moments, by site.
StyleFeatures = tuple[dict[str, tuple[Tensor, Tensor, Tensor]], dict[str, Tensor]]
# A channel that is nearly the same in all tokens has no deviation to be stretched, but rounding.
GREATEST_SCALE = 100.0
# Trust in a motion from which on it is followed.
VISIBLE = 0.5


@dataclass(frozen=True)
class Site:
    """A self-attention or a norm of a model.

    Attributes:
        key: unique name.
        depth: its place along the up path in 0..1; None where no style enters.
    """

    key: str
    depth: float | None


def sites_of(names: list[str], up: str) -> dict[str, Site]:
    """Self-attentions of a UNet by name, in the order of its modules; those whose names begin with ``up`` have a depth."""
    path = [name for name in names if name.startswith(up)]
    return {n: Site(n, path.index(n) / max(1, len(path) - 1) if n in path else None) for n in names}


class StyleSession:
    """Features of style pictures and source frames at one step, and the frames that read them.

    A step first records, then applies: ``with session.record_style(weights): model(style)``, the same for the content,
    then ``with session.apply(...): model(frames)``. Outside these blocks every site is the plain model's. What was
    recorded lives until the next step; the session until the window is done.

    Args:
        injection: the knobs, scaled by the run's strength.
    """

    def __init__(self, injection: StyleInjection):
        self.injection = injection
        self.shares: list[float] = []
        self._style: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._content: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}
        self._mode: str | None = None
        self._progress = 0.0
        self._temporal = TemporalContext()
        self._nearby: dict[tuple[int, int], Tensor] = {}

    @property
    def wants_style(self) -> bool:
        """Whether style pictures have to be evaluated at this progress."""
        return bool(self.injection.attention or self.injection.norm)

    @property
    def wants_content(self) -> bool:
        """Whether the source frames have to be evaluated too."""
        return bool(self.injection.attention and self.injection.query)

    @property
    def style_features(self) -> StyleFeatures:
        """What was recorded of the style pictures last."""
        return dict(self._style), dict(self._moments)

    @style_features.setter
    def style_features(self, features: StyleFeatures) -> None:
        self._style, self._moments = (dict(part) for part in features)

    @contextmanager
    def record_style(self, shares: list[float]) -> Iterator[None]:
        """In this block the batch is the style pictures; ``shares`` says how much each counts."""
        self.shares = shares
        self._style.clear()
        self._moments.clear()
        yield from self._in_mode("style")

    @contextmanager
    def record_content(self) -> Iterator[None]:
        """In this block the batch is the source frames, the anchor's first."""
        self._content.clear()
        yield from self._in_mode("content")

    @contextmanager
    def apply(self, progress: float, temporal: TemporalContext) -> Iterator[None]:
        """In this block the batch is ``(b t)``: the frames of each guidance branch.

        Args:
            progress: place along the steps in 0..1.
        """
        self._progress, self._temporal = progress, temporal
        yield from self._in_mode("apply")

    def _in_mode(self, mode: str) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None

    def _gate(self, site: Site) -> float:
        """Share of the style that enters at a site now, 0..1, by the knobs ``layers`` and ``steps``."""
        if site.depth is None:
            return 0.0
        return trapezoid(site.depth, self.injection.layers) * self.injection.gate(self._progress)

    def attend(
        self, site: Site, q: Tensor, k: Tensor, v: Tensor, plain: Attend, across: AttendAcross | None = None
    ) -> Tensor:
        """A self-attention with what this session adds to it.

        Args:
            q, k, v: ``[B, heads, n, d]``.
            plain: the model's own attention of q over k and v; any number of keys.
            across: :func:`...kernels.cross_frame_attention.cross_frame_attention`, where it may stand for ``plain``;
                without it keys and values are gathered for ``plain``.
        """
        if self._mode == "apply":
            return self._apply(site, q, k, v, plain, across)
        if self._mode is not None and site.depth is not None and trapezoid(site.depth, self.injection.layers):
            if self._mode == "content":
                self._content[site.key] = q
                declare_cache(q)
            else:
                self._style[site.key] = (q, k, v)
                declare_cache(q, k, v)
        return plain(q, k, v)

    def _apply(self, site: Site, q: Tensor, k: Tensor, v: Tensor, plain: Attend, across: AttendAcross | None) -> Tensor:
        out = self._among_frames(q, k, v, plain, across)
        share = self.injection.attention * self._gate(site)
        if not share or site.key not in self._style:
            return out
        self._refuse_tiles(q)
        return torch.lerp(out, self._styled(site, q, k, v, plain, across), share)

    def _among_frames(self, q: Tensor, k: Tensor, v: Tensor, plain: Attend, across: AttendAcross | None) -> Tensor:
        """Every frame over the tokens of its sources."""
        frames, sources = self._temporal.frames, self.injection.sources
        if sources == ("self",) or frames == 1:
            return plain(q, k, v)
        self._refuse_tiles(q)
        table = source_table(frames, q.device, tuple(s for s in sources if s != "warped"))
        nearby = self._tokens_before(q.shape[2], k.shape[2]) if "warped" in sources else None
        q, k, v = (x.unflatten(0, (-1, frames)) for x in (q, k, v))
        if nearby is not None:
            # Each query has tokens of its own, which no plain attention takes.
            return (across or cross_frame_attention)(q, k, v, table, nearby=nearby).flatten(0, 1)
        if across is None:
            return plain(q.flatten(0, 1), gathered(k, table), gathered(v, table))
        return across(q, k, v, table).flatten(0, 1)

    def _refuse_tiles(self, q: Tensor) -> None:
        frames, branches = self._temporal.frames, self._temporal.branches
        if branches and len(q) != len(branches) * frames:
            raise InputError(
                f"model gives attention {len(q)} pictures for {frames} frames in {len(branches)} branches of guidance: "
                "another node, such as HyperTile, cuts them into tiles; take that node out"
            )

    def _tokens_before(self, count: int, keys: int) -> Tensor | None:
        """Where the motion says that each of so many tokens was in the frame before; the window's frames stand still."""
        motion = self._temporal.motion
        if motion is not None and (count, keys) not in self._nearby:
            height, width = motion.shape[-2:]
            while height * width > count:
                height, width = -(-height // 2), -(-width // 2)
            if height * width != count or count != keys:
                raise InputError(
                    f"sources = warped finds {count} queries and {keys} keys in attention, which no halving of "
                    f"{motion.shape[-1]}x{motion.shape[-2]} latents gives: another node merges or resizes them; take that "
                    "node out, or give sources = self+previous+anchor"
                )
            motion = latent_motion(motion, (height, width))
            visible = motion[:, 2] > VISIBLE
            # The anchor has none before it, and what the window's first frame came from is not in the batch.
            visible[:2] = False
            self._nearby[count, keys] = warped_neighbourhood(motion[:, :2], visible)
        return self._nearby.get((count, keys))

    def _styled(
        self, site: Site, q: Tensor, k: Tensor, v: Tensor, plain: Attend, across: AttendAcross | None
    ) -> Tensor:
        """Every frame over the tokens of each style picture, the pictures' outputs mixed by their shares."""
        knobs = self.injection
        if site.key in self._content:
            content = self._content[site.key]
            q = torch.lerp(q, content.repeat(len(q) // len(content), 1, 1, 1), knobs.query)
        out = None
        for i, share in enumerate(self.shares):
            picture = [x[i : i + 1] for x in self._style[site.key]]
            one = self._over_picture(q, k, v, *picture, plain, across) * share
            out = one if out is None else out + one
        return out

    def _over_picture(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sq: Tensor,
        sk: Tensor,
        sv: Tensor,
        plain: Attend,
        across: AttendAcross | None,
    ) -> Tensor:
        """Every frame over one picture's tokens, after AdaIN."""
        knobs = self.injection
        keys, values = (x.expand(len(q), -1, -1, -1) for x in (sk, sv))
        if knobs.adain == "query_key":
            affines = adain_affine(q, sq), adain_affine(k, sk)
            if across is not None:
                own = torch.arange(len(q), device=q.device)[:, None]
                return across(
                    q[None], k[None], v[None], own, sk, sv, temperature=knobs.temperature,
                    affines=tuple(a[None] for a in affines),
                )[0]  # fmt: skip
            q, k = (apply_affine(x, a) for x, a in zip((q, k), affines, strict=True))
            keys, values = torch.cat([k, keys], dim=2), torch.cat([v, values], dim=2)
        if knobs.adain == "key_value":
            begin, end = knobs.blend
            b = begin + (end - begin) * self._progress
            # A clip's tokens are those of several frames; the picture's are met by each of them.
            keys, values = (x.repeat(1, 1, k.shape[2] // x.shape[2], 1) for x in (keys, values))
            keys, values = (
                torch.lerp(whole, apply_affine(x, adain_affine(x, style)), b)
                for whole, x, style in ((keys, k, sk), (values, v, sv))
            )
        return plain(q * knobs.temperature, keys, values)

    def norm_hook(self, site: Site) -> Callable[..., Tensor]:
        """:meth:`normalise` as a forward hook of a norm."""
        return lambda module, inputs, output: self.normalise(site, output)

    def normalise(self, site: Site, h: Tensor) -> Tensor:
        """A norm's output ``[(b t), C, H, W]`` with ST-Norm applied to it."""
        if not self.listens:
            return h
        affine = self.calibration(site, channel_moments(h))
        return h if affine is None else affine_act(h, *affine)

    @property
    def listens(self) -> bool:
        """Whether norms are recorded or changed now."""
        return self._mode in ("style", "apply")

    def calibration(self, site: Site, moments: Tensor) -> tuple[Tensor, Tensor] | None:
        """ST-Norm of a norm's output as scale and shift ``[(b t), C]``, or None where it is left as it is.

        Args:
            moments: of that output ``[(b t), 2, C]``.
        """
        if self._mode == "style":
            self._moments[site.key] = _pooled(moments, self.shares)
        if self._mode != "apply" or not self.injection.norm:
            return None
        style, amount = self._moments.get(site.key), self.injection.norm
        if style is not None:
            amount *= self._gate(site)
        moments = rearrange(moments, "(b t) m c -> b t m c", t=self._temporal.frames)
        return calibration(moments, self._temporal, site.key, amount, style)


@dataclass(frozen=True)
class NormSite:
    """A norm of a model, and the session that it asks."""

    session: StyleSession
    site: Site

    @property
    def active(self) -> bool:
        return self.session.listens

    def calibration(self, moments: Tensor) -> tuple[Tensor, Tensor] | None:
        """See :meth:`StyleSession.calibration`."""
        return self.session.calibration(self.site, moments)


def pooled_moments(h: Tensor, shares: list[float]) -> Tensor:
    """Raw moments ``[2, C]`` of pictures' features ``[m, C, H, W]``, mixed by shares that sum to 1."""
    return _pooled(frame_moments(h, 1)[:, 0], shares)


def _pooled(moments: Tensor, shares: list[float]) -> Tensor:
    return sum(m * share for m, share in zip(moments, shares, strict=True))


def adain_affine(x: Tensor, style: Tensor, eps: float = 1e-5) -> Tensor:
    """AdaIN over tokens (Huang and Belongie 2017, eq. 8) as scale, centre and shift by channel.

    Args:
        x: tokens ``[B, heads, n, d]``. style: ``[1, heads, m, d]``, whose mean and deviation they take.

    Returns:
        float32 ``[B, heads, 3, d]``, as :func:`...kernels.cross_frame_attention.apply_affine` takes it.
    """
    (mean, std), (to_mean, to_std) = (_token_statistics(y, eps) for y in (x, style))
    scale = (to_std / std).clamp(max=GREATEST_SCALE)
    return torch.stack([scale, mean, to_mean.expand_as(mean)], -2)


def _token_statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation over tokens, float32 ``[B, heads, d]``."""
    count = x.shape[2]
    moments = channel_moments(rearrange(x, "b h n d -> b (h d) n 1")).unflatten(-1, (x.shape[1], -1))
    mean, second = moments.unbind(1)
    variance = (second - mean.square()).clamp(min=0) * (count / max(1, count - 1))
    return mean, variance.sqrt() + eps
