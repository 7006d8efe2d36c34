"""Classifier-free guidance."""

from __future__ import annotations

from torch import Tensor


def guide(styled: Tensor, plain: Tensor, scale: float, rescale: float = 0.7) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022, eq. 6) whose contrast is held back (Lin et al. 2024, eq. 15, 16).

    Args:
        styled, plain: predictions with and without the style ``[t, C, h, w]``.
        scale: 1 is ``styled``, 0 is ``plain``; above 1 the style is exaggerated.
        rescale: share of the way back to the standard deviation of ``styled``, per frame and channel.
    """
    guided = plain + scale * (styled - plain)
    if scale <= 1:
        return guided
    mean = guided.mean((-2, -1), keepdim=True)
    wanted = styled.std((-2, -1), keepdim=True)
    factor = wanted / guided.std((-2, -1), keepdim=True).clamp(min=1e-6)
    return mean + (guided - mean) * (1 + rescale * (factor - 1))
