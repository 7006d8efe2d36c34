"""Which blocks of keys a block of queries reads: a coarse attention between means chooses (sparse, multi-resolution)."""

import torch
from torch import Tensor

from .cross_frame_attention import block_sizes


def choose_blocks(q: Tensor, k: Tensor, sources: Tensor, share: float) -> Tensor:
    """The blocks of keys that matter to each block of queries, by the product of their mean query and mean key.

    The style's tokens are not chosen among: they are always read. Attention over the chosen blocks is exact when share is 1.

    Args:
        q, k: ``[b, t, heads, n, d]``.
        sources: int64 ``[t, s]``, as of :func:`.cross_frame_attention.cross_frame_attention`.
        share: of the blocks to keep, in (0, 1].

    Returns:
        int32 ``[b, t, heads, query blocks, count]``, ascending: a source's number times its blocks, plus the block.
    """
    queries, keys = block_sizes(q.shape[-1])
    coarse_q, coarse_k = _block_means(q, queries), _block_means(k, keys)
    blocks = coarse_k.shape[-2]
    scores = torch.einsum("bthqd,btshkd->bthqsk", coarse_q, coarse_k[:, sources]).flatten(-2)
    count = max(1, round(share * sources.shape[1] * blocks))
    return scores.topk(count, -1).indices.sort(-1).values.int()


def _block_means(x: Tensor, size: int) -> Tensor:
    """``[b, t, heads, n, d]`` -> means of blocks ``[b, t, heads, blocks, d]``; the last may be a short one."""
    whole = x.shape[-2] // size * size
    means = x[..., :whole, :].unflatten(-2, (-1, size)).mean(-2)
    rest = [x[..., whole:, :].mean(-2, keepdim=True)] if whole < x.shape[-2] else []
    return torch.cat([means, *rest], -2)
