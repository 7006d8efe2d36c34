"""Each kernel against PyTorch in double precision: on the CPU under Triton's interpreter, and on a GPU as compiled."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from comfyui_veostyle.kernels import cross_frame_attention as attention
from comfyui_veostyle.kernels import fp8_linear, kv_int4, local_correlation, lora_slots, reflect, st_norm, tuning
from comfyui_veostyle.kernels import report as kernel_report
from comfyui_veostyle.kernels._triton import cdiv, next_power_of_2
from comfyui_veostyle.kernels.block_mask import choose_blocks
from comfyui_veostyle.veo_core.layers.style_session import adain_affine
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is not installed")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on this machine; see the gpu tests")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = st.fixed_dictionaries(
    {
        "b": st.integers(1, 2),
        "t": st.integers(1, 4),
        "heads": st.integers(1, 2),
        "n": st.integers(1, 40),
        "d": st.sampled_from([16, 24, 40, 64, 80]),
        "s": st.integers(1, 4),
        "m": st.sampled_from([0, 1, 5, 16, 33]),
        "others": st.sampled_from([None, 1, 5]),
    }
)


def make(b, t, heads, n, d, s, m, dtype=torch.float16, device="cpu", seed=0, others=None):
    """Inputs as a model gives them: views whose heads lie within a token. ``others``: frames to read, if not the same."""
    generator = torch.Generator().manual_seed(seed)
    frames = others or t
    q, k, v = (
        torch.randn(b, f, n, heads, d, generator=generator).to(device, dtype).transpose(2, 3)
        for f in (t, frames, frames)
    )
    table = torch.randint(0, frames, (t, s), generator=generator).to(device)
    style = (
        [torch.randn(b, heads, m, d, generator=generator).to(device, dtype) for _ in range(2)] if m else [None, None]
    )
    return q, k, v, table, *style


def exact(inputs, **options):
    """The reference in double precision."""
    return attention.reference(
        *(x.double() if x is not None and x.is_floating_point() else x for x in inputs), **options
    )


def error(out, wanted):
    return float((out.double() - wanted).norm() / wanted.norm())


def kernel(inputs, weights=None, temperature=1.0, kept=None, affines=None, nearby=None):
    scale = temperature * inputs[0].shape[-1] ** -0.5
    return attention.launch(*inputs, weights, kept, *(affines or (None, None)), nearby, scale)


def adain_of(inputs, seed=0):
    """Scale, centre and shift of each frame's queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*x.shape[:3], 3, x.shape[4]) for x in inputs[:2]]
    return tuple((torch.rand(s, generator=generator) + 0.5).to(inputs[0].device) for s in shapes)


def far_from_zero(ratio, dtype=torch.float16, device="cpu", d=40):
    """Inputs whose channels' means are ``ratio`` deviations, and their AdaIN to queries around zero and the style's keys.

    One channel of the keys is the same in all tokens.
    """
    q, k, v, table, style_k, style_v = make(1, 3, 2, 64, d, 2, 48, torch.float32)
    to_q = make(1, 1, 2, 64, d, 1, 0, torch.float32, seed=1)[0][0]
    generator = torch.Generator().manual_seed(2)
    q, k, style_k = (x + ratio * torch.randn(*x.shape[:-2], 1, d, generator=generator) for x in (q, k, style_k))
    k[..., 3] = ratio
    q, k, v, style_k, style_v = (x.to(device, dtype) for x in (q, k, v, style_k, style_v))
    affines = tuple(adain_affine(x[0], to)[None] for x, to in ((q, to_q.to(q)), (k, style_k)))
    return (q, k, v, table.to(device), style_k, style_v), affines


def tokens_nearby(inputs, m=9, seed=0):
    """Tokens of any frame for each query; some have none."""
    q, k = inputs[:2]
    generator = torch.Generator().manual_seed(seed)
    size = (q.shape[1], q.shape[3], m)
    nearby = torch.randint(-1, k.shape[1] * k.shape[3], size, generator=generator)
    nearby[:, ::3] = -1
    return nearby.to(q.device)


@interpreted
@given(shape=SHAPES, temperature=st.sampled_from([1.0, 1.5]), weighted=st.booleans())
@settings(max_examples=20, deadline=None)
def test_attention_computes_what_the_reference_does(shape, temperature, weighted):
    inputs = make(**shape)
    weights = torch.rand(shape["s"] + 1) + 0.1 if weighted else None
    wanted = exact(inputs, weights=weights, temperature=temperature)
    assert error(kernel(inputs, weights, temperature), wanted) < 1e-3


@interpreted
@given(shape=SHAPES, affine=st.booleans(), near=st.booleans(), weighted=st.booleans())
@settings(max_examples=20, deadline=None)
def test_attention_takes_statistics_and_nearby_tokens_as_the_reference_does(shape, affine, near, weighted):
    inputs = make(**shape)
    given = {"affines": adain_of(inputs) if affine else None, "nearby": tokens_nearby(inputs) if near else None}
    given["weights"] = torch.rand(shape["s"] + 1) + 0.1 if weighted else None
    assert error(kernel(inputs, **given), exact(inputs, **given)) < 1e-3


@interpreted
@pytest.mark.parametrize("ratio", [0, 3, 10, 30])
@pytest.mark.parametrize("near", [False, True])
def test_statistics_far_from_zero_are_taken_away_and_not_rounded(ratio, near):
    """The balance between a frame's tokens and the style's holds, whatever the means; a dead channel does no harm."""
    inputs, affines = far_from_zero(ratio)
    nearby = tokens_nearby(inputs) if near else None
    wanted = exact(inputs, affines=affines, nearby=nearby)
    assert error(kernel(inputs, affines=affines, nearby=nearby), wanted) < 1e-3
    # Its moved keys are kept in half precision, means and all.
    assert error(attention.reference(*inputs, affines=affines, nearby=nearby), wanted) < 1e-3 * (1 + ratio)


@interpreted
def test_a_channel_without_deviation_does_not_overflow():
    """As of a flat frame: the picture's queries are far from zero there, and its keys vary."""
    q, k, v, table, style_k, style_v = make(1, 3, 2, 64, 40, 2, 48)
    k[..., 3] = 0.0
    to_q = make(1, 1, 2, 64, 40, 1, 0, seed=1)[0][0]
    to_q[..., 3] += 70
    affines = tuple(adain_affine(x[0], to)[None] for x, to in ((q, to_q), (k, style_k)))
    inputs = q, k, v, table, style_k, style_v
    assert error(kernel(inputs, affines=affines), exact(inputs, affines=affines)) < 5e-3


def test_merged_queries_are_left_to_pytorch(monkeypatch):
    """Another node may merge tokens of the queries and not of the keys."""
    q, k, v, table, *style = make(2, 3, 2, 8, 16, 2, 4, torch.float64)
    few = q[..., :5, :]
    out = attention.cross_frame_attention(few, k, v, table, *style, weights=torch.ones(3))
    torch.testing.assert_close(out, attention.cross_frame_attention(q, k, v, table, *style)[..., :5, :])
    monkeypatch.setattr(attention, "runs_on", lambda *tensors: True)
    assert attention.takes(q.half(), k.half(), v.half())
    assert not attention.takes(few.half(), k.half(), v.half())


@interpreted
def test_statistics_may_lie_anyhow():
    inputs = make(2, 3, 2, 20, 24, 2, 5)
    affines = adain_of(inputs)
    strided = tuple(a.transpose(-1, -2).contiguous().transpose(-1, -2) for a in affines)
    assert torch.equal(kernel(inputs, affines=strided), kernel(inputs, affines=affines))
    spread = tuple(a[:1, :1].expand(*a.shape).double() for a in affines)
    assert error(kernel(inputs, affines=spread), exact(inputs, affines=spread)) < 1e-3


def test_nearby_tokens_of_other_maps_are_refused():
    inputs = make(1, 3, 2, 6, 16, 1, 4)
    with pytest.raises(ValueError, match=r"nearby: \[3, 5\] is not \[3, 6\]"):
        attention.cross_frame_attention(*inputs, nearby=torch.zeros(3, 5, 9, dtype=torch.int64))


@interpreted
@given(shape=SHAPES, share=st.sampled_from([0.2, 0.5, 1.0]))
@settings(max_examples=10, deadline=None)
def test_attention_over_chosen_blocks_is_the_reference_under_a_mask(shape, share):
    inputs = make(**shape)
    kept = choose_blocks(inputs[0], inputs[1], inputs[3], share)
    assert error(kernel(inputs, kept=kept), exact(inputs, kept=kept)) < 1e-3
    if share == 1.0:
        assert error(exact(inputs, kept=kept), exact(inputs)) < 1e-12


def test_the_blocks_that_matter_are_chosen():
    """A query block that agrees with one block of keys reads it first."""
    queries, keys = attention.block_sizes(16)
    size = math.lcm(queries, keys)
    q, k = torch.zeros(2, 1, 1, 1, 4 * size, 16).unbind(0)
    k[..., 2 * size : 3 * size, 3] = 1
    q[..., 3] = 1
    kept = choose_blocks(q, k, torch.zeros(1, 1, dtype=torch.int64), 0.25)
    assert kept.tolist()[0][0][0] == [list(range(2 * size // keys, 3 * size // keys))] * (4 * size // queries)


@interpreted
def test_a_frame_that_is_not_listed_is_not_read():
    """Poisoned frames, and what lies between the heads of a strided tensor, do not reach the result."""
    q, k, v, _, _, _ = make(1, 4, 2, 20, 40, 2, 0)
    table = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]])
    clean = kernel((q, k, v, table, None, None))
    k[:, 2:], v[:, 2:] = float("nan"), float("nan")
    assert torch.equal(kernel((q, k, v, table, None, None)), clean)
    assert clean.isfinite().all()


@interpreted
@given(
    rows=st.integers(1, 9).flatmap(
        lambda count: st.lists(st.lists(st.integers(0, 2), min_size=count, max_size=count), min_size=3, max_size=3)
    ),
    style=st.sampled_from([0, 5]),
    near=st.booleans(),
    affine=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_a_frame_listed_twice_counts_twice(rows, style, near, affine):
    q, k, v, _, *style = make(1, 3, 1, 20, 16, 1, style)
    inputs = q, k, v, torch.tensor(rows), *style
    given = {"nearby": tokens_nearby(inputs) if near else None, "affines": adain_of(inputs) if affine else None}
    assert error(kernel(inputs, **given), exact(inputs, **given)) < 1e-3


@interpreted
@pytest.mark.parametrize(
    ("row", "weighted", "frames_read"),
    [
        ([0, 0, 0], False, 1),
        ([0, 1, 0], False, 2),
        ([0, 1, 2], False, 3),
        ([0, 0, 0], True, 3),
        ([1] * attention.hopper.MOST_MERGED, False, 1),
        ([1] * (attention.hopper.MOST_MERGED + 1), False, attention.hopper.MOST_MERGED + 1),
    ],
)
def test_a_frame_listed_twice_is_read_once(monkeypatch, row, weighted, frames_read):
    """Where no weights tell its places apart, and the list is not too long: by the blocks of keys that are read."""
    q, k, v, _, *style = make(1, 3, 1, 20, 16, 1, 5)
    step, steps = attention._step, []
    monkeypatch.setattr(attention, "_step", lambda *given: steps.append(None) or step(*given))
    kernel((q, k, v, torch.tensor([row] * 3), *style), weights=torch.ones(len(row) + 1) if weighted else None)
    blocks_of_queries = blocks_of_a_frame = 2
    assert len(steps) == 3 * blocks_of_queries * (frames_read * blocks_of_a_frame + 1)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_sizes_on_the_host_are_tritons(x, y):
    assert cdiv(x, y) == triton.cdiv(x, y)
    assert next_power_of_2(x) == triton.next_power_of_2(x)


def test_on_the_cpu_attention_is_the_reference():
    q, k, v, table, style_k, style_v = inputs = make(1, 3, 2, 10, 16, 3, 4, torch.float32)
    out = attention.cross_frame_attention(*inputs)
    for b, t, h in itertools.product(*map(range, q.shape[:3])):
        keys = torch.cat([*(k[b, s, h] for s in table[t]), style_k[b, h]]).double()
        values = torch.cat([*(v[b, s, h] for s in table[t]), style_v[b, h]]).double()
        logits = q[b, t, h].double() @ keys.T / q.shape[-1] ** 0.5
        assert (logits.softmax(-1) @ values - out[b, t, h]).abs().max() < 1e-5
    if not torch.cuda.is_available():
        assert attention.state()[0] == "pytorch"


def test_a_weight_is_a_convex_mix_of_the_groups():
    """Two equal groups at weights 1 and 3 count as a quarter and three quarters of the whole."""
    q, k, v, _, _, _ = make(1, 2, 1, 6, 16, 2, 0, torch.float64)
    table = torch.tensor([[0, 1], [0, 1]])
    k = k[:, :1].expand(-1, 2, -1, -1, -1)
    mixed = attention.reference(q, k, v, table, weights=torch.tensor([1.0, 3.0, 1.0]))
    alone = [attention.reference(q, k, v, table[:, i : i + 1]) for i in (0, 1)]
    torch.testing.assert_close(mixed, alone[0] / 4 + alone[1] * 3 / 4)


def test_adain_of_queries_and_keys_is_the_change_of_the_tensors():
    q, k, v, table, *style = make(2, 3, 2, 10, 16, 2, 4, torch.float64)
    affines = tuple(a.double() for a in adain_of((q, k)))
    moved_q, moved_k = (
        (x - centre[..., None, :]) * scale[..., None, :] + shift[..., None, :]
        for x, (scale, centre, shift) in zip((q, k), (a.unbind(-2) for a in affines))
    )
    out = attention.cross_frame_attention(q, k, v, table, *style, affines=affines)
    torch.testing.assert_close(out, attention.cross_frame_attention(moved_q, moved_k, v, table, *style))


def test_nearby_tokens_count_as_those_of_a_source_do():
    """A query that has all tokens of a frame nearby reads that frame; one that has none does not."""
    q, k, v, table, *style = make(1, 3, 2, 6, 16, 1, 4, torch.float64)
    before = torch.tensor([2, 0, 1])
    nearby = before[:, None, None] * 6 + torch.arange(6).expand(3, 6, 6)
    nearby[0] = -1
    out = attention.cross_frame_attention(q, k, v, table, *style, nearby=nearby)
    both = attention.cross_frame_attention(q, k, v, torch.stack([table[:, 0], before], 1), *style)
    torch.testing.assert_close(out[:, 1:], both[:, 1:])
    torch.testing.assert_close(out[:, :1], attention.cross_frame_attention(q, k, v, table, *style)[:, :1])


def test_queries_may_read_frames_that_are_not_theirs():
    q, _, _, _, _, _ = make(2, 3, 2, 6, 16, 1, 0, torch.float64)
    _, k, v, _, _, _ = make(2, 5, 2, 6, 16, 1, 0, torch.float64, seed=1)
    out = attention.cross_frame_attention(q, k, v, torch.tensor([[4], [0], [1]]))
    wanted = F.scaled_dot_product_attention(q, k[:, [4, 0, 1]], v[:, [4, 0, 1]])
    torch.testing.assert_close(out, wanted)


def test_a_plan_sees_its_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = torch.empty(2, 5, 8)
        assert torch.ops.veostyle.lora_slots(y, y, y[0], y[0].T, y[0, :, 0]).shape == y.shape
        wide = torch.empty(2, 6, 5, 8).permute(0, 3, 1, 2)
        assert torch.ops.veostyle.group_norm(wide, 4, y[0, 0], y[0, 0], 1e-5, True).stride() == wide.stride()
        q, k, v = (torch.empty(2, 3, 4, 20, 40, dtype=torch.float16) for _ in range(3))
        table = torch.zeros(3, 2, dtype=torch.int64)
        more = torch.zeros(2, 3, 4, 3, 40), torch.zeros(2, 3, 4, 3, 40), torch.zeros(3, 20, 9, dtype=torch.int64)
        out = torch.ops.veostyle.cross_frame_attention(q, k, v, table, None, None, None, None, *more, 1.0)
        h = torch.empty(2, 8, 4, 4)
        assert torch.ops.veostyle.channel_moments(h).shape == (2, 2, 8)
    assert out.shape == q.shape
    assert out.dtype == q.dtype


MAPS = st.tuples(st.integers(1, 3), st.sampled_from([8, 12, 96]), st.integers(2, 17), st.integers(1, 33))


@interpreted
@given(shape=MAPS, last=st.booleans(), silu=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_group_norm_is_pytorchs(shape, last, silu, seed):
    """Of groups that are taken at once and of larger ones, with and without something added before."""
    torch.manual_seed(seed)
    h = (torch.randn(shape) * 2 + 3).half()
    h = h.to(memory_format=torch.channels_last) if last else h
    weight, bias = torch.randn(2, shape[1])
    added = torch.randn(shape[:2]) if seed % 2 else None
    wanted = st_norm.group_norm(
        h.double(), 4, weight.double(), bias.double(), 1e-3, added=None if added is None else added.double()
    )
    out = st_norm.launch_group_norm(h, 4, weight, bias, 1e-3, silu, added)
    assert error(out, F.silu(wanted) if silu else wanted) < 1e-3
    assert out.stride() == h.stride()


@interpreted
@pytest.mark.parametrize("mean", [0, 300, -3000])
@pytest.mark.parametrize("size", [(3, 5), (24, 24)])
def test_a_mean_far_from_zero_does_not_swallow_the_deviations(mean, size):
    h = torch.randn(2, 8, *size) + mean
    weight, bias = torch.randn(2, 8)
    wanted = F.group_norm(h.double(), 4, weight.double(), bias.double(), 1e-6)
    assert error(st_norm.launch_group_norm(h, 4, weight, bias, 1e-6, False), wanted) < 1e-3


def test_the_reference_of_affine_is_single_precision_inside():
    h = (100 + torch.randn(2, 8, 6, 6)).half()
    scale = torch.full((2, 8), 100.0)
    wanted = h.double() * 100 - 10000
    assert error(st_norm.affine_act(h, scale, -100 * scale), wanted) < 1e-3


@interpreted
@given(shape=MAPS, last=st.booleans(), silu=st.booleans(), added=st.booleans())
@settings(max_examples=20, deadline=None)
def test_moments_and_affine_are_the_references(shape, last, silu, added):
    h = torch.randn(shape).half()
    h = h.to(memory_format=torch.channels_last) if last else h
    scale, shift = torch.randn(2, *shape[:2])
    residual = torch.randn(shape).half() if added else None
    torch.testing.assert_close(st_norm.launch_moments(h), st_norm.channel_moments(h), atol=1e-5, rtol=1e-4)
    wanted = st_norm.affine_act(h.double(), scale, shift, silu, residual)
    assert error(st_norm.launch_affine(h, scale, shift, silu, residual), wanted) < 1e-3
    weight, bias = torch.randn(2, shape[1])
    by_moments = st_norm.affine_act(
        h.double(), *st_norm.group_affine(st_norm.channel_moments(h), 4, weight, bias, 1e-3), silu
    )
    by_pytorch = st_norm.group_norm(h.double(), 4, weight.double(), bias.double(), 1e-3, silu)
    assert error(by_moments, by_pytorch) < 1e-3


# Few programs: the interpreter runs one after another.
SMALL_MAPS = st.tuples(st.integers(1, 2), st.sampled_from([3, 24, 96]), st.integers(2, 5), st.integers(1, 33))


@interpreted
@given(shape=SMALL_MAPS, silu=st.booleans(), double=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=12, deadline=None)
def test_reflected_borders_are_pytorchs(shape, silu, double, seed):
    torch.manual_seed(seed)
    h = torch.randn(*shape[:3], shape[3] + 1).half().to(memory_format=torch.channels_last)
    out = reflect.launch_reflect(h, silu, double)
    assert error(out, reflect.reflect_pad(h.double(), silu, double)) < 1e-3
    assert out.is_contiguous(memory_format=torch.channels_last)


@interpreted
@given(shape=SMALL_MAPS, last=st.booleans(), radius=st.integers(0, 3), seed=st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_correlation_is_the_references(shape, last, radius, seed):
    torch.manual_seed(seed)
    layout = torch.channels_last if last else torch.contiguous_format
    a, b = (x.to(memory_format=layout) for x in torch.randn(2, *shape))
    out = local_correlation.launch_correlation(a, b, radius)
    torch.testing.assert_close(out, local_correlation.local_correlation(a, b, radius), atol=1e-5, rtol=1e-5)


def test_correlation_peaks_at_the_shift():
    a = F.normalize(torch.randn(1, 16, 12, 12), dim=1)
    b = torch.roll(a, (1, -2), (2, 3))
    best = local_correlation.local_correlation(a, b, 3).argmax(1)[0, 4:8, 4:8]
    assert (best == (3 + 1) * 7 + (3 - 2)).all()


HEADS = st.tuples(st.integers(1, 3), st.integers(1, 70), st.sampled_from([16, 40, 64, 80]))


@given(shape=HEADS, outliers=st.sampled_from([1.0, 10.0, 100.0]), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_four_bits_keep_values_within_half_a_step(shape, outliers, seed):
    torch.manual_seed(seed)
    k, v = torch.randn(2, *shape).half()
    k[..., 3] *= outliers
    packed = kv_int4.pack(k, v)
    got_k, got_v = kv_int4.unpack(packed)
    k_step = packed.k_step.repeat_interleave(kv_int4.GROUP, -2)[..., : shape[1], :].float()
    assert ((got_k.float() - k.float()).abs() <= 0.51 * k_step + 2e-3 * k.float().abs() + 1e-3).all()
    # The step itself is no larger than the widest span of a group of keys takes.
    span = k.float().amax((-2, -1)) - k.float().amin((-2, -1))
    assert (packed.k_step.float().flatten(1).amax(1) <= 1.02 * span.flatten() / 15 + 1e-3).all()
    assert (got_v.float() - v.float()).abs().max() <= 0.6 * packed.v_step.float().max() + 1e-2
    if not torch.cuda.is_available():
        for x, y in zip(kv_int4.launch_unpack(packed), (got_k, got_v)):
            torch.testing.assert_close(x, y)


def test_four_bits_of_equal_values_are_exact_and_take_five_bits_an_element():
    k = torch.full((2, 64, 64), 3.0).half()
    packed = kv_int4.pack(k, -k)
    assert torch.equal(kv_int4.unpack(packed)[0], k)
    assert torch.equal(kv_int4.unpack(packed)[1], -k)
    assert packed.nbytes * 8 <= 5 * 2 * k.numel()


def test_attention_over_four_bits_errs_as_the_scheme_does():
    """Gaussian or with strong outliers: about a seventh, as measured for the scheme (see algorithms: KIVI)."""
    for outliers in (1.0, 100.0):
        q, k, v, table, _, _ = make(1, 1, 4, 256, 64, 1, 0, torch.float32)
        k = k.contiguous()
        k[..., 3] *= outliers
        q[..., 3] /= outliers
        keys, values = kv_int4.unpack(kv_int4.pack(k, v))
        assert error(attention.reference(q, keys, values, table), exact((q, k, v, table, None, None))) < 0.2


def adapters(rows, inputs, outputs, ranks, device="cpu"):
    """A layer's output and input, factors side by side, and a strength for each rank, some of them 0."""
    x, y = torch.randn(2, rows, inputs), torch.randn(2, rows, outputs)
    down, up = torch.randn(ranks, inputs) / inputs**0.5, torch.randn(outputs, ranks)
    strengths = torch.randn(ranks) * (torch.arange(ranks) % 3 != 1)
    return [z.half().to(device) for z in (y, x, down, up)] + [strengths.to(device)]


def added(y, x, down, up, strengths):
    y, x, down, up, strengths = (z.double() for z in (y, x, down, up, strengths))
    return y + sum(s * (x @ a)[..., None] * b for s, a, b in zip(strengths, down, up.T))


@interpreted
@given(
    rows=st.integers(1, 40), inputs=st.sampled_from([8, 40, 100]), outputs=st.sampled_from([8, 70]),
    ranks=st.sampled_from([1, 4, 12, 60]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_slots_add_what_the_adapters_add(rows, inputs, outputs, ranks):
    given = adapters(rows, inputs, outputs, ranks)
    assert error(lora_slots.launch(*given), added(*given)) < 1e-3
    assert error(lora_slots.lora_slots(*given), added(*given)) < 2e-3


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """A chip on which a setting takes as long as it says; gives what was tried."""
    tried = []

    def time(run, settings):
        tried.append(settings)
        return settings.get("ms")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_time", time)
    tuning._known.cache_clear()
    yield tried
    tuning._known.cache_clear()


CANDIDATES = [{"ms": 3}, {"a": 0}, {"ms": 1}, {"ms": 2}]


def test_the_fastest_setting_is_found_once_and_kept_on_disk(chip):
    assert tuning.best("attention", "small", CANDIDATES, print) == {"ms": 1}
    assert chip == CANDIDATES
    tuning._known.cache_clear()
    assert tuning.best("attention", "small", CANDIDATES, print) == {"ms": 1}
    assert len(chip) == len(CANDIDATES)
    assert tuning.best("attention", "large", CANDIDATES[:1], print) == {"ms": 3}
    # One that is no candidate any more is not taken.
    assert tuning.best("attention", "small", CANDIDATES[:1], print) == {"ms": 3}


@pytest.mark.parametrize("spoilt", ["", "[1]", "{"])
def test_a_spoilt_or_unwritable_file_of_settings_does_no_harm(chip, monkeypatch, spoilt):
    tuning.cache_file().parent.mkdir()
    tuning.cache_file().write_text(spoilt)
    assert tuning.best("attention", "small", CANDIDATES, print) == {"ms": 1}
    monkeypatch.setattr(tuning.Path, "write_text", lambda *a: (_ for _ in ()).throw(PermissionError("read only")))
    assert tuning.best("attention", "large", CANDIDATES, print) == {"ms": 1}


def test_settings_that_none_run_are_an_error_and_a_capture_tries_none(chip, monkeypatch):
    with pytest.raises(RuntimeError, match="none of 1 settings runs for small on this chip"):
        tuning.best("attention", "small", [{"a": 0}], print)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    chip.clear()
    assert tuning.best("attention", "small", CANDIDATES, print) == {"ms": 3}
    assert not chip


def test_reports_say_why_a_kernel_is_off():
    reports = list(kernel_report.reports())
    assert len({r.name for r in reports}) == len(reports) > 3
    for report in reports:
        assert report.reason
        if not torch.cuda.is_available():
            assert "CUDA" in report.reason
        assert report.state != "failed"
        assert (report.ours is None) == (kernel_report.state()[0] != "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 8, 4096, 40, 3, 0), (2, 17, 8, 1024, 80, 3, 0), (2, 5, 8, 64, 160, 4, 256), (1, 4, 10, 1000, 64, 2, 7),
     (1, 4, 12, 1792, 128, 4, 256), (1, 2, 3, 1, 24, 1, 0), (1, 2, 3, 77, 200, 2, 1), (3, 1, 2, 129, 32, 4, 64),
     (1, 3, 2, 300, 96, 3, 100), (1, 3, 2, 300, 12, 3, 100), (2, 3, 2, 300, 40, 3, 100, 5), (2, 4, 2, 65, 128, 2, 9, 1)],
)  # fmt: skip
@pytest.mark.parametrize("options", ["plain", "weighted", "half the blocks", "affine", "nearby", "all"])
def test_compiled_attention_computes_what_the_reference_does(shape, dtype, options):
    inputs = make(*shape[:7], dtype, "cuda", others=shape[7] if len(shape) > 7 else None)
    given = {"temperature": 1.5}
    if options in ("affine", "all"):
        given["affines"] = adain_of(inputs)
    if options in ("nearby", "all"):
        given["nearby"] = tokens_nearby(inputs)
    if options in ("weighted", "all"):
        given["weights"] = torch.rand(shape[5] + 1, device="cuda") + 0.1
    if options in ("half the blocks", "all"):
        given["kept"] = choose_blocks(inputs[0], inputs[1], inputs[3], 0.5)
    out = attention.cross_frame_attention(*inputs, **given)
    assert attention.takes(*inputs[:3])
    assert error(out, exact(inputs, **given)) < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3, 2, 300, 40, 3, 100), (2, 4, 8, 1024, 80, 4, 256), (1, 2, 4, 77, 160, 2, 0)])
def test_the_kernel_of_other_chips_computes_the_same(shape, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attention.hopper, "state", lambda device=None: ("pytorch", "as on another chip"))
    tuning._known.cache_clear()
    inputs = make(*shape, device="cuda")
    assert error(attention.cross_frame_attention(*inputs), exact(inputs)) < 1e-3
    assert tuning.cache_file().exists()
    kept = choose_blocks(inputs[0], inputs[1], inputs[3], 0.5)
    given = {"kept": kept, "affines": adain_of(inputs), "nearby": tokens_nearby(inputs)}
    assert error(attention.cross_frame_attention(*inputs, **given), exact(inputs, **given)) < 1e-3
    tuning._known.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0, 10, 30])
@pytest.mark.parametrize("d", [12, 40, 64, 80, 128, 160])
def test_compiled_attention_takes_away_means_far_from_zero(d, ratio, dtype):
    """By the kernel of this chip, or of any where the head size is not Hopper's (12)."""
    inputs, affines = far_from_zero(ratio, dtype, "cuda", d)
    wanted = exact(inputs, affines=affines)
    limit = 1e-3 if dtype == torch.float16 else 8e-3
    assert error(attention.cross_frame_attention(*inputs, affines=affines), wanted) < limit
    assert error(attention.reference(*inputs, affines=affines), wanted) < limit * (1 + ratio)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 300, 1024])
@pytest.mark.parametrize("count", [2, 4, 7, 8])
@pytest.mark.parametrize("style", [0, 100, 256])
def test_compiled_attention_counts_a_frame_as_often_as_it_is_listed(n, count, style):
    """All alike, all different, in pairs, and one that comes again at the end."""
    q, k, v, _, *style = make(1, 8, 2, n, 80, 1, style, device="cuda")
    some = torch.arange(count)
    again = torch.where(some == count - 1, 0, some)
    table = torch.stack(
        [some * 0 + 3, some, some // 2, again, some.flip(0), some % 2, some % 3, some.clamp(max=1)]
    ).cuda()
    inputs = q, k, v, table, *style
    near = tokens_nearby(inputs)
    assert error(attention.cross_frame_attention(*inputs), exact(inputs)) < 1e-3
    assert error(attention.cross_frame_attention(*inputs, nearby=near), exact(inputs, nearby=near)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiled_attention_counts_a_style_of_many_blocks_once(dtype):
    """More blocks of style than a list of small frames has places."""
    q, k, v, _, *style = make(1, 4, 2, 64, 80, 1, 1500, dtype, device="cuda")
    table = torch.tensor([[0, 0], [0, 1], [2, 2], [3, 2]], device="cuda")
    inputs = q, k, v, table, *style
    assert error(attention.cross_frame_attention(*inputs), exact(inputs)) < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.gpu
def test_compiled_attention_reads_only_what_is_listed():
    q, k, v, _, _, _ = make(1, 4, 2, 200, 40, 2, 0, device="cuda")
    table = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]], device="cuda")
    clean = attention.cross_frame_attention(q, k, v, table)
    k[:, 2:], v[:, 2:] = float("nan"), float("nan")
    assert torch.equal(attention.cross_frame_attention(q, k, v, table), clean)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(16, 320, 64, 64), (1, 128, 512, 512), (2, 1280, 8, 8), (17, 256, 9, 16), (3, 96, 33, 17), (2, 64, 1, 1)]
)
def test_compiled_norms_are_pytorchs(shape, last):
    h = (torch.randn(shape, device="cuda") * 2 + 3).half()
    h = h.to(memory_format=torch.channels_last) if last else h
    weight, bias = torch.randn(2, shape[1], device="cuda")
    wanted = F.silu(F.group_norm(h.double(), 32, weight.double(), bias.double(), 1e-5))
    assert error(st_norm.group_norm(h, 32, weight, bias, 1e-5, silu=True), wanted) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 160, 135, 240), (3, 24, 33, 17), (1, 3, 1080, 1920), (1, 32, 2, 2)])
@pytest.mark.parametrize(("silu", "double"), [(False, False), (True, False), (False, True)])
def test_compiled_borders_are_pytorchs(shape, silu, double):
    h = torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last)
    assert (
        error(reflect.reflect_pad(h, silu, double), reflect.reflect_pad(h.double().cpu(), silu, double).cuda()) < 1e-3
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("shape", "radius"), [((2, 32, 270, 480), 3), ((1, 96, 9, 17), 4), ((3, 48, 1, 5), 3)])
def test_compiled_correlation_is_the_references(shape, radius, layout):
    a, b = (x.to(memory_format=layout) for x in torch.randn(2, *shape, device="cuda"))
    wanted = local_correlation.local_correlation(a.cpu(), b.cpu(), radius).cuda()
    torch.testing.assert_close(local_correlation.local_correlation(a, b, radius), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4096, 320, 320, 48), (77, 768, 1280, 4), (1000, 1280, 10240, 128), (50, 64, 64, 200)]
)
def test_compiled_slots_add_what_the_adapters_add(shape):
    given = adapters(*shape, device="cuda")
    assert error(lora_slots.lora_slots(*given), added(*given)) < 2e-3


@pytest.mark.gpu
def test_compiled_unpacking_is_the_references():
    k, v = torch.randn(2, 3, 5, 77, 80, device="cuda").half()
    packed = kv_int4.pack(k, v)
    on_cpu = kv_int4.PackedKV(*(x.cpu() for x in vars(packed).values()))
    for x, y in zip(kv_int4.unpack(packed), kv_int4.unpack(on_cpu)):
        torch.testing.assert_close(x.cpu(), y)


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1.0, 1e4])
def test_eight_bits_have_no_bias_at_any_magnitude(scale):
    weight = (torch.randn(64, 64) * scale).half()
    narrow, factor = fp8_linear.quantise(weight)
    back = fp8_linear.widened(narrow, factor, torch.float64)
    assert error(back, weight.double()) < 0.04
    assert abs(float((back * weight).sum() / (weight.double() ** 2).sum()) - 1) < 0.01


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 0, 8\) cannot be packed"):
        kv_int4.pack(torch.zeros(2, 0, 8), torch.zeros(2, 0, 8))
    k = torch.tensor([[65504.0, -65504.0]] * 32).half().T.reshape(2, 32, 1).expand(2, 32, 2).contiguous()
    assert all(x.isfinite().all() for x in kv_int4.unpack(kv_int4.pack(k, k)))


def test_eight_bits_of_a_weight_err_by_a_few_percent():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 96), torch.randn(5, 7, 96)
    narrow, scale = fp8_linear.quantise(weight)
    assert narrow.element_size() == 1
    assert error(fp8_linear.fp8_linear(x, narrow, scale), x.double() @ weight.double().T) < 0.04
    zero, one = fp8_linear.quantise(torch.zeros(4, 4))
    assert not fp8_linear.fp8_linear(torch.randn(2, 4), zero, one).any()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4096, 320, 2560), (77, 768, 320), (5, 24, 40)])
def test_eight_bits_on_both_sides_err_by_a_few_percent(sizes):
    rows, inputs, outputs = sizes
    x, weight = torch.randn(2, rows, inputs, device="cuda").half(), torch.randn(outputs, inputs, device="cuda").half()
    bias = torch.randn(outputs, device="cuda").half()
    out = fp8_linear.fp8_linear(x, *fp8_linear.quantise(weight), bias)
    assert error(out, F.linear(x.double(), weight.double(), bias.double())) < 0.05


@interpreted
def test_a_hopper_kernel_that_does_not_compile_gives_way_to_the_other_and_says_so(monkeypatch, caplog):
    from triton.errors import TritonError

    hopper = attention.hopper
    monkeypatch.setattr(hopper, "_refused", [])
    monkeypatch.setattr(hopper, "triton_state", lambda device: ("triton", "Triton 9"))
    monkeypatch.setattr(hopper, "gluon", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert hopper.takes(64)
    assert not hopper.takes(12)
    assert attention.block_sizes(64) == hopper.block_sizes(64)
    assert attention.block_sizes(12) == (16, 16)
    hopper.refuse(TritonError("at 3:1\nno such layout"))
    assert hopper.state() == ("pytorch", "Triton 9 does not compile the kernel for Hopper: no such layout")
    assert "no such layout" in caplog.text


def test_asking_whether_triton_runs_within_a_trace_uses_real_memory(monkeypatch):
    """A plan traces tensors without data; a kernel given one of them would write anywhere."""
    from contextlib import nullcontext

    from comfyui_veostyle.kernels import _triton
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    given, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(_triton, "_write_one", {(1,): lambda x: (given.append(x), x.fill_(1))})
    with FakeTensorMode():
        assert _triton._tried(0)[0] == "triton"
    assert not isinstance(given[0], FakeTensor)
    monkeypatch.setattr(_triton, "_write_one", {(1,): lambda x: given[9]})
    assert _triton._tried(0) == (
        "pytorch",
        f"Triton {_triton.triton.__version__} does not run here: list index out of range",
    )


def test_a_plan_for_a_chip_with_kernels_is_traced_without_one(monkeypatch):
    from comfyui_veostyle.kernels import _triton
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(_triton, "_state", lambda index: ("triton", "as if"))
    with FakeTensorMode():
        h, weight = (torch.empty(*s, device="cuda:0", dtype=torch.float16) for s in ((2, 8, 4, 4), (8,)))
        assert st_norm.group_norm(h, 4, weight, weight, 1e-5, True, weight.expand(2, 8)).shape == h.shape
        scale, shift = st_norm.channel_moments(h).unbind(1)
        assert st_norm.affine_act(h, scale, shift, True).device == h.device
        q = torch.empty(1, 3, 2, 64, 40, device="cuda:0", dtype=torch.float16)
        table = torch.zeros(3, 3, dtype=torch.int64, device="cuda:0")
        assert attention.cross_frame_attention(q, q, q, table).shape == q.shape
        x = torch.empty(5, 8, device="cuda:0", dtype=torch.float16)
        assert lora_slots.lora_slots(x, x, x[:4], x[:4].T.expand(8, 4), weight[:4].float()).shape == x.shape
