"""Classifier-free guidance."""

from __future__ import annotations

from torch import Tensor


def guide(styled: Tensor, plain: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022, eq. 6) that keeps the moments of the styled prediction.

    Above scale 1, every channel of every frame is brought back to the mean and standard deviation of ``styled``
    (Lin et al. 2024, eqs. 15 and 16, with the mean as well): what is exaggerated is the pattern, not the contrast.

    Args:
        styled, plain: predictions with and without the style ``[t, C, h, w]``.
        scale: 1 is ``styled``, 0 is ``plain``; above 1 the style is exaggerated.
    """
    guided = plain + scale * (styled - plain)
    if scale <= 1:
        return guided
    deviation = guided - guided.mean((-2, -1), keepdim=True)
    factor = styled.std((-2, -1), keepdim=True) / guided.std((-2, -1), keepdim=True).clamp(min=1e-6)
    return styled.mean((-2, -1), keepdim=True) + deviation * factor
