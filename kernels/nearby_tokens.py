"""A few tokens of its own for each query, joined to an attention that is already there.

Such as the 3x3 tokens where the motion says a token was in the frame before: few, other ones for each query, and so no
matter for the tensor cores. What the attention has summed counts by its log-sum-exp, as in the split keys of Flash-Decoding
(Dao et al. 2023).
"""

from einops import rearrange
from torch import Tensor

from ._triton import INTERPRETED, are_aligned, at_head, cdiv, jit, next_power_of_2, on_its_device, tl


def nearby_tokens(x: Tensor, nearby: Tensor) -> Tensor:
    """``x [b, t', heads, n, d]`` at ``nearby [t, r, m]``, ``frame * n + token``: ``[b, t, heads, r, m, d]``; -1 gives any."""
    entry, n = nearby.clamp(min=0), x.shape[3]
    return rearrange(x[:, entry // n, :, entry % n], "t r m b h d -> b t h r m d")


@jit
def _moved(x, place, inside, D: tl.constexpr):
    """Tokens after their affine, in single precision; ``place`` is each one's scale, the centre and the shift follow."""
    scale = tl.load(place, mask=inside, other=0.0)
    centre = tl.load(place + D, mask=inside, other=0.0)
    shift = tl.load(place + 2 * D, mask=inside, other=0.0)
    return (x - centre) * scale + shift


@jit(any_value=("heads", "frames", "k_frames", "tokens"))
def _add(
    out, logsums, q, k, v, nearby, q_affine, k_affine, out_b, out_t, out_h, out_n, q_b, q_t, q_h, q_n, k_b, k_t, k_h, k_n,
    v_b, v_t, v_h, v_n, heads, frames, k_frames, tokens, scale,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr, AFFINE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    rows, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    head, frame = tl.program_id(1) % heads, tl.program_id(1) // heads
    t, b = (frame % frames).to(tl.int64), (frame // frames).to(tl.int64)
    there = rows < tokens
    inside = there[:, None] & (channels < D)[None, :]
    place = q + b * q_b + t * q_t + at_head(head, q_h, ALIGNED) + rows[:, None] * q_n + channels[None, :]
    query = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if AFFINE:
        q_affine += ((b * frames + t) * heads + head) * 3 * D + channels
        k_affine += (b * k_frames * heads + head) * 3 * D + channels
        query = _moved(query, q_affine[None, :], (channels < D)[None, :], D)
        # Rounded as the attention's are: what that does to all logits of a query falls out.
        query = query.to(q.dtype.element_ty).to(tl.float32)
    place = out + b * out_b + t * out_t + at_head(head, out_h, ALIGNED) + rows[:, None] * out_n + channels[None, :]
    sums = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    most = tl.load(logsums + ((b * frames + t) * heads + head) * tokens + rows, mask=there, other=0.0)
    total = tl.full([ROWS], 1.0, tl.float32)
    k += b * k_b + at_head(head, k_h, ALIGNED)
    v += b * v_b + at_head(head, v_h, ALIGNED)
    for i in range(NEAR):
        entry = tl.load(nearby + (t * tokens + rows) * NEAR + i, mask=there, other=-1).to(tl.int32)
        read = inside & (entry >= 0)[:, None]
        source, token = entry // tokens, entry % tokens
        key_place = k + source.to(tl.int64)[:, None] * k_t + token[:, None] * k_n + channels[None, :]
        key = tl.load(key_place, mask=read, other=0.0).to(tl.float32)
        if AFFINE:
            key = _moved(key, k_affine[None, :] + source[:, None] * (heads * 3 * D), read, D)
        logit = tl.where(entry >= 0, tl.sum(query * key, 1) * scale, float("-inf"))
        value_place = v + source.to(tl.int64)[:, None] * v_t + token[:, None] * v_n + channels[None, :]
        value = tl.load(value_place, mask=read, other=0.0).to(tl.float32)
        new = tl.maximum(most, logit)
        share, fade = tl.exp2(logit - new), tl.exp2(most - new)
        total = total * fade + share
        sums = sums * fade[:, None] + share[:, None] * value
        most = new
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@on_its_device
def add_nearby(
    out: Tensor,
    logsums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    nearby: Tensor,
    affines: tuple[Tensor, Tensor] | None,
    scale: float,
) -> None:
    """Joins nearby tokens to an attention's result, in place.

    Args:
        out: ``[b, t, heads, n, d]``, the attention over everything else. logsums: float32 ``[b, t, heads, n]``, its
            log-sum-exp to base 2.
        nearby, affines: as of :func:`.cross_frame_attention.cross_frame_attention`.
        scale: factor on the logits, to base 2.
    """
    b, t, heads, n, d = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    padded = next_power_of_2(d)
    rows = 16 if INTERPRETED else max(16, 4096 // padded)
    _add[(cdiv(n, rows), b * t * heads)](
        out, logsums, q, k, v, nearby.contiguous(), *(affines or (q, q)), *out.stride()[:4], *q.stride()[:4], *k.stride()[:4],
        *v.stride()[:4], heads, t, k.shape[1], n, scale, D=d, PADDED=padded, ROWS=rows, NEAR=nearby.shape[-1],
        AFFINE=affines is not None, ALIGNED=are_aligned(out, q, k, v),
    )  # fmt: skip
