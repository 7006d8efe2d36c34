"""DDIM inversion."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def invert(clean: Tensor, levels: list[tuple[float, float]], noise_of: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """Latents at each level of noise from which deterministic sampling leads back to clean ones.

    DDIM (Song et al. 2021, eq. 14) run backwards: the noise predicted at one level is used to step to the next.

    Args:
        clean: ``[n, C, h, w]``.
        levels: ``(a, s)`` by step, the noisiest first.
        noise_of: the noise that the model predicts in latents ``a x_0 + s e`` at a step.

    Returns:
        One ``[n, C, h, w]`` a level, in the levels' order.
    """
    a, s = levels[-1]
    # The first prediction is made on clean latents, as DDIMInverseScheduler does.
    x = a * clean + s * noise_of(clean, len(levels) - 1)
    trail = [x]
    for index in range(len(levels) - 1, 0, -1):
        noise = noise_of(x, index)
        x0 = (x - levels[index][1] * noise) / levels[index][0]
        x = levels[index - 1][0] * x0 + levels[index - 1][1] * noise
        trail.insert(0, x)
    return trail
