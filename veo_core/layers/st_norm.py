"""ST-Norm: spatio-temporal normalisation, the layer that keeps a style's statistics steady along a clip."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
from einops import rearrange
from torch import Tensor, nn

from ...kernels.st_norm import affine_act, channel_moments
from ..memory.trace import declare_handed


@dataclass
class TemporalContext:
    """What the temporal layers of a network must know about the frames in a batch.

    A batch is laid out ``(b t)``: for each of ``b`` clips, ``frames`` consecutive entries. The first of them is the
    scene's anchor frame, the others are consecutive frames of one window.

    Attributes:
        frames: t, the anchor included; at least 1.
        carry: reference moments left by the window before, one ``[b, 2, C]`` float32 tensor per layer key. Empty at
            the first window of a scene, where the reference starts from the anchor's own moments.
        hand_over: index into the window (anchor not counted) whose reference the next window starts from.
        scope: prefix of the layer keys, one per denoising step and guidance branch.
        branches: names of the ``b`` clips where a batch may hold some of them at a time; each has moments of its own.
        handed: filled by the layers with the moments at ``hand_over``; the next window's ``carry``.
        motion: ``[t, 3, h, w]``, flow to the frame before in latent pixels and trust in 0..1, the anchor's first; None
            where it is not known.
    """

    frames: int = 1
    _: KW_ONLY
    carry: dict[str, Tensor] = field(default_factory=dict)
    hand_over: int | None = None
    scope: str = ""
    branches: tuple[str, ...] = ()
    handed: dict[str, Tensor] = field(default_factory=dict)
    motion: Tensor | None = None


def frame_moments(h: Tensor, frames: int) -> Tensor:
    """First and second raw moments over space, in float32.

    Args:
        h: features ``[(b t), C, H, W]``.
        frames: t.

    Returns:
        ``[b, t, 2, C]``: mean of h and mean of h squared.
    """
    return rearrange(channel_moments(h), "(b t) m c -> b t m c", t=frames)


def temporal_reference(moments: Tensor, start: Tensor, rate: float) -> Tensor:
    """Causal running reference ``m_t = (1 - rate) m_{t-1} + rate mu_t`` in closed form, O(1) state.

    Args:
        moments: per-frame moments ``[b, t, 2, C]``.
        start: ``m_{-1}``, ``[b, 2, C]``.
        rate: how fast the reference follows, in (0, 1].

    Returns:
        ``[b, t, 2, C]``.
    """
    t = moments.shape[1]
    steps = torch.arange(t, device=moments.device)
    age = steps[:, None] - steps[None, :]
    weights = torch.where(age >= 0, rate * (1 - rate) ** age.clamp(min=0).to(moments.dtype), 0.0)
    decay = (1 - rate) ** (steps + 1).to(moments.dtype)
    return torch.einsum("ts,bsmc->btmc", weights, moments) + decay[None, :, None, None] * start[:, None]


def carried_reference(moments: Tensor, context: TemporalContext, key: str, rate: float) -> Tensor:
    """The running reference of a layer, from where the window before left it; the anchor's is its own moments.

    Args:
        moments: ``[b, t, 2, C]``, the anchor's first. Others as of :func:`temporal_reference`.
        key: of the layer; the reference at ``context.hand_over`` is left under it.
    """
    anchor, window = moments[:, :1], moments[:, 1:]
    key = context.scope + key
    keys = [f"{key}.{branch}" for branch in context.branches] or [key]
    # One key for the whole batch, or one for each branch.
    own = [anchor[:, 0]] if not context.branches else anchor[:, 0].split(1)
    start = torch.cat([context.carry.get(k, first) for k, first in zip(keys, own, strict=True)])
    reference = temporal_reference(window, start, rate)
    if context.hand_over is not None:
        left = reference[:, context.hand_over].detach()
        # Copies: a view would keep the reference of all frames alive until the next window is done.
        parts = [part.clone() for part in (left.split(1) if context.branches else [left])]
        declare_handed(*parts)
        context.handed |= dict(zip(keys, parts, strict=True))
    return torch.cat([anchor, reference], dim=1)


def calibration(
    moments: Tensor,
    context: TemporalContext,
    key: str,
    amount: float,
    style: Tensor | None = None,
    rate: float = 0.1,
    steadiness: float = 0.88,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """ST-Norm without training: ``(1 - a) h + a ((h - mean) / std * std_s + mean_s)``, as a scale and a shift of h.

    With a style, mean and std are blended between the frame's own (1 - steadiness) and the clip's, and mean_s and std_s
    are the style's. Without one they are the frame's own, and the clip's.

    Args:
        moments: of h ``[b, t, 2, C]``, the anchor's first in each clip.
        amount: a.
        style: raw moments ``[2, C]``.

    Returns:
        float32 ``[(b t), C]`` each.
    """
    reference = carried_reference(moments, context, key, rate) if context.frames > 1 else moments
    target = reference
    if style is not None:
        moments, target = torch.lerp(moments, reference, steadiness), style.float().expand_as(moments)
    (mean, std), (to_mean, to_std) = (_mean_std(m, eps) for m in (moments, target))
    scale = torch.lerp(torch.ones_like(std), to_std / std, amount)
    return scale, torch.lerp(mean, to_mean, amount) - mean * scale


def calibrate(
    h: Tensor, context: TemporalContext, key: str, amount: float, style: Tensor | None = None, **options: float
) -> Tensor:
    """Features ``[(b t), C, H, W]`` after :func:`calibration`; at amount 0, ``h`` itself."""
    if amount == 0:
        return h
    return affine_act(h, *calibration(frame_moments(h, context.frames), context, key, amount, style, **options))


def _mean_std(moments: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, second = rearrange(moments, "b t m c -> m (b t) c")
    return mean, (second - mean.square()).clamp(min=0).add(eps).sqrt()


class STNorm(nn.Module):
    """Normalises each frame by moments blended between the frame's own and the clip's, then applies the style's affine.

    ``m = lambda reference + (1 - lambda) mu_t`` (likewise the second moment), ``lambda_c = sigmoid(theta_c)``, and
    ``y = (h - mean) / std * (1 + gamma) + beta`` with ``gamma, beta`` a zero-initialised linear map of the condition.
    Raw moments are blended, never standard deviations, so that the variance stays that of a mixture.

    Args:
        channels: C.
        condition_dim: width of the condition vector (style and time).
        key: name under which this layer's reference moments are carried between windows; unique in a network.
        rate: how fast the temporal reference follows the frames.
    """

    def __init__(self, channels: int, condition_dim: int, key: str, rate: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.key, self.rate, self.eps = key, rate, eps
        self.theta = nn.Parameter(torch.full((channels,), 2.0))
        self.affine = nn.Linear(condition_dim, 2 * channels)
        nn.init.zeros_(self.affine.weight)
        nn.init.zeros_(self.affine.bias)

    def forward(self, h: Tensor, condition: Tensor, context: TemporalContext, silu: bool = False) -> Tensor:
        """``h [(b t), C, H, W]``, ``condition [b, D]`` -> the shape and dtype of ``h``, through SiLU where asked."""
        moments = frame_moments(h, context.frames)
        if context.frames > 1:
            reference = carried_reference(moments, context, self.key, self.rate)
            lam = torch.sigmoid(self.theta.float())
            moments = torch.lerp(moments, reference, lam)
        mean, std = _mean_std(moments, self.eps)
        gamma, beta = self.affine(condition).float().chunk(2, dim=-1)
        gamma, beta = (x.repeat_interleave(context.frames, 0) for x in (gamma, beta))
        scale = (1 + gamma) / std
        return affine_act(h, scale, beta - mean * scale, silu)
