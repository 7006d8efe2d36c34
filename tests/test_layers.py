"""ST-Norm and cross-frame style attention: what they promise, whatever the window."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_veostyle.veo_core.layers.cross_frame_attention import (
    CrossFrameStyleAttention,
    cross_frame_attention,
    source_table,
)
from comfyui_veostyle.veo_core.layers.st_norm import (
    STNorm,
    TemporalContext,
    calibrate,
    frame_moments,
    temporal_reference,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def norm(channels=6, width=4, seed=0):
    torch.manual_seed(seed)
    layer = STNorm(channels, width, "n")
    torch.nn.init.normal_(layer.affine.weight)
    return layer


@given(st.integers(1, 9), st.floats(0.05, 1.0))
def test_reference_is_the_recursion(frames, rate):
    moments, start = torch.randn(2, frames, 2, 3), torch.randn(2, 2, 3)
    wanted, last = [], start
    for t in range(frames):
        last = (1 - rate) * last + rate * moments[:, t]
        wanted.append(last)
    assert torch.allclose(temporal_reference(moments, start, rate), torch.stack(wanted, 1), atol=1e-5)


def test_one_frame_is_instance_norm():
    layer, h = norm(), torch.randn(3, 6, 8, 8)
    torch.nn.init.zeros_(layer.affine.weight)
    assert torch.allclose(layer(h, torch.zeros(3, 4), TemporalContext()), F.instance_norm(h), atol=1e-5)


def test_affine_is_the_identity_at_first():
    layer, h = STNorm(6, 4, "n"), torch.randn(2, 6, 8, 8)
    assert torch.equal(layer(h, torch.zeros(2, 4), TemporalContext()), layer(h, torch.randn(2, 4), TemporalContext()))


@settings(deadline=None)
@given(split=st.integers(1, 7), shared=st.integers(0, 3))
def test_windows_that_carry_equal_one_long_window(split, shared):
    assume(split > shared)
    layer, h, condition = norm(), torch.randn(9, 6, 5, 5), torch.randn(1, 4)
    anchor, frames = h[:1], h[1:]
    whole = layer(h, condition, TemporalContext(frames=9))[1:]
    handed = {}
    first = TemporalContext(frames=1 + split, hand_over=split - shared - 1, handed=handed)
    a = layer(torch.cat([anchor, frames[:split]]), condition, first)[1:]
    rest = frames[split - shared :]
    b = layer(torch.cat([anchor, rest]), condition, TemporalContext(frames=1 + len(rest), carry=handed))[1:]
    assert torch.allclose(torch.cat([a[: split - shared], b]), whole, atol=1e-5)


def test_an_object_that_enters_moves_the_rest_less():
    layer = norm()
    torch.manual_seed(1)
    still = torch.randn(1, 6, 16, 16)
    frames = still.repeat(8, 1, 1, 1)
    frames[4:, :, :, 8:] += 4.0
    out = layer(torch.cat([still, frames]), torch.zeros(1, 4), TemporalContext(frames=9))[1:]
    alone = layer(frames, torch.zeros(8, 4), TemporalContext())
    change = [(o[4, :, :, :8] - o[3, :, :, :8]).abs().mean() for o in (out, alone)]
    assert change[0] < 0.5 * change[1]


def test_gradients_reach_every_parameter():
    layer, h = norm(), torch.randn(6, 6, 4, 4, requires_grad=True)
    layer(h, torch.randn(2, 4), TemporalContext(frames=3)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [*layer.parameters(), h])
    assert frame_moments(h, 3).shape == (2, 3, 2, 6)


def test_attention_over_itself_alone_is_plain_attention():
    q, k, v = torch.randn(3, 2, 1, 4, 10, 8)
    none = torch.zeros(2, 4, 0, 8)
    out = cross_frame_attention(q, k, v, torch.zeros(1, 1, dtype=torch.long), none, none)
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v), atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(frames=st.integers(1, 5), tokens=st.integers(1, 12), style=st.integers(0, 4))
def test_attention_equals_a_loop_in_float64(frames, tokens, style):
    q, k, v = torch.randn(3, 2, frames, 2, tokens, 8, dtype=torch.float64)
    style_k, style_v = torch.randn(2, 2, 2, style, 8, dtype=torch.float64)
    table = source_table(frames)
    out = cross_frame_attention(q, k, v, table, style_k, style_v)
    for t in range(frames):
        keys = torch.cat([*(k[:, s] for s in table[t]), style_k], dim=2)
        values = torch.cat([*(v[:, s] for s in table[t]), style_v], dim=2)
        weights = (q[:, t] @ keys.mT / 8**0.5).softmax(-1)
        assert torch.allclose(out[:, t], weights @ values, atol=1e-10)


def test_anchor_does_not_depend_on_the_window():
    torch.manual_seed(0)
    layer = CrossFrameStyleAttention(64, 16)
    torch.nn.init.normal_(layer.to_out.weight)
    anchor, tokens = torch.randn(1, 64, 4, 6), torch.randn(1, 3, 16)
    windows = [torch.cat([anchor, torch.randn(n, 64, 4, 6)]) for n in (1, 4)]
    outs = [layer(w, tokens, len(w))[0] for w in windows]
    assert torch.allclose(outs[0], outs[1], atol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_source_table(frames):
    table = source_table(frames)
    assert table.shape == (frames, 3)
    assert table[0].tolist() == [0, 0, 0]
    assert all(row.tolist() == [i, i - 1, 0] for i, row in enumerate(table) if i)


def test_calibration_of_amount_0_is_the_input_itself():
    h = torch.randn(5, 4, 6, 6)
    assert calibrate(h, TemporalContext(5), "k", 0.0) is h


@pytest.mark.parametrize("frames", [1, 5])
def test_full_calibration_takes_the_style_s_moments(frames):
    h = torch.randn(frames, 4, 16, 16) * 3 + 1
    style = torch.stack([torch.full((4,), 0.5), torch.full((4,), 0.5**2 + 0.2**2)])
    out = calibrate(h, TemporalContext(frames), "k", 1.0, style, steadiness=0.0)
    assert torch.allclose(out.mean((2, 3)), torch.full((frames, 4), 0.5), atol=1e-4)
    assert torch.allclose(out.std((2, 3)), torch.full((frames, 4), 0.2), atol=1e-3)
    half = calibrate(h, TemporalContext(frames), "k", 0.5, style, steadiness=0.0)
    assert torch.allclose(half, (h + out) / 2, atol=1e-5)


def test_without_a_style_frames_are_held_to_the_clip_s_moments():
    base = torch.randn(1, 4, 16, 16).expand(9, -1, -1, -1)
    flicker = base * torch.linspace(0.8, 1.2, 9).roll(4)[:, None, None, None]
    out = calibrate(flicker, TemporalContext(9), "k", 1.0)
    assert out.std((2, 3)).diff(dim=0).abs().max() < 0.3 * flicker.std((2, 3)).diff(dim=0).abs().max()


@pytest.mark.parametrize("branches", [(), ("1", "0")])
def test_moments_pass_from_window_to_window(branches):
    """Two windows with an overlap, branches together or one at a time, calibrate as one long window does."""
    count = max(1, len(branches))
    frames = torch.randn(count, 11, 4, 6, 6) + torch.arange(11)[None, :, None, None, None] * 0.1
    whole = calibrate(frames.flatten(0, 1), TemporalContext(11, branches=branches), "k", 0.7).unflatten(0, (count, 11))
    first = TemporalContext(7, hand_over=3, branches=branches)
    calibrate(frames[:, :7].flatten(0, 1), first, "k", 0.7)
    second = torch.cat([frames[:, :1], frames[:, 5:]], 1)
    pieces = [(second, branches)]
    if branches:
        pieces = [(second[i : i + 1], (name,)) for i, name in enumerate(branches)]
    out = torch.cat(
        [
            calibrate(x.flatten(0, 1), TemporalContext(7, carry=first.handed, branches=b), "k", 0.7).unflatten(
                0, (len(x), 7)
            )
            for x, b in pieces
        ]
    )
    assert torch.allclose(out[:, 1:], whole[:, 5:], atol=1e-5)
