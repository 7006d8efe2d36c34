"""Warping, optical flow and fusion."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_veostyle.veo_core.errors import ModelError
from comfyui_veostyle.veo_core.motion.flow import FlowNet, flow_both_ways, load_flow
from comfyui_veostyle.veo_core.motion.fusion import TemporalFusion, estimate_motion, latent_motion
from comfyui_veostyle.veo_core.motion.warp import visible_mask, warp, warped_neighbourhood
from hypothesis import given, settings
from hypothesis import strategies as st


def texture(seed, height=96, width=128):
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(1, 3, height, width)
    for cells in (6, 12, 24):
        coarse = torch.rand(1, 3, cells, cells, generator=generator)
        total += F.interpolate(coarse, (height, width), mode="bicubic") / 3
    return total.clamp(0, 1)


def shifted(image, dx, dy):
    flow = torch.tensor([-dx, -dy]).view(1, 2, 1, 1).expand(1, 2, *image.shape[-2:]).float()
    return warp(image, flow, "bicubic")


@given(st.integers(-8, 8), st.integers(-8, 8))
def test_warp_by_whole_pixels_is_a_shift(dx, dy):
    image = torch.rand(1, 2, 24, 24)
    moved = warp(image, torch.tensor([dx, dy]).view(1, 2, 1, 1).expand(1, 2, 24, 24).float())
    inner = (slice(None), slice(None), slice(8, 16), slice(8, 16))
    assert torch.allclose(moved[inner], torch.roll(image, (-dy, -dx), (2, 3))[inner], atol=1e-4)


def test_visible_is_what_both_frames_see():
    flow = torch.zeros(1, 2, 16, 16)
    flow[:, 0] = 4
    mask = visible_mask(flow, -flow)
    assert mask[..., :12].all()
    assert not mask[..., 12:].any()
    assert not visible_mask(flow, flow)[..., :10].any()


@given(st.integers(-3, 3), st.integers(-3, 3))
def test_a_neighbourhood_lies_where_the_flow_points_in_the_frame_before(dx, dy):
    flow = torch.tensor([dx + 0.2, dy - 0.2]).view(1, 2, 1, 1).expand(3, 2, 6, 7)
    visible = torch.ones(3, 6, 7, dtype=torch.bool)
    visible[1, 2, 3] = False
    tokens = warped_neighbourhood(flow, visible)
    assert (tokens[0] == -1).all()
    assert (tokens[1, 2 * 7 + 3] == -1).all()
    for y in range(6):
        for x in range(7):
            for i in range(9):
                a, b = x + dx + i % 3 - 1, y + dy + i // 3 - 1
                wanted = 42 + b * 7 + a if 0 <= a < 7 and 0 <= b < 6 else -1
                assert tokens[2, y * 7 + x, i] == wanted


@settings(max_examples=8, deadline=None)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(0, 50))
def test_bundled_flow_finds_a_shift(engine, dx, dy, seed):
    image = texture(seed)
    moved = shifted(image, dx, dy)
    there, back = flow_both_ways(engine.flow, torch.cat([image, moved]))
    inner = (slice(None), slice(None), slice(5, -5), slice(5, -5))
    wanted = torch.tensor([-dx, -dy]).view(1, 2, 1, 1) / 4
    assert (there - wanted)[inner].norm(dim=1).mean() * 4 < 1.0
    assert (back + wanted)[inner].norm(dim=1).mean() * 4 < 1.0


@pytest.mark.parametrize("size", [(64, 64), (72, 104), (100, 36)])
def test_motion_has_a_quarter_of_any_size(engine, size):
    motion = estimate_motion(engine.flow, torch.rand(3, 3, *size))
    assert motion.shape == (2, 3, size[0] // 4, size[1] // 4)
    assert motion[:, 2].min() >= 0
    assert motion[:, 2].max() <= 1
    small = latent_motion(motion, (size[0] // 8, size[1] // 8))
    assert torch.allclose(small[:, 0].mean(), motion[:, 0].mean() / 2, atol=0.05)


def test_still_noise_is_fused_away():
    torch.manual_seed(0)
    clean, fusion = texture(1), TemporalFusion()
    motion = torch.zeros(1, 3, 24, 32)
    motion[:, 2] = 1
    noisy = [clean + 0.05 * torch.randn_like(clean) for _ in range(12)]
    fused = [fusion(frame, motion) for frame in noisy]
    change = [(s[-1] - s[-2]).abs().mean() for s in (fused, noisy)]
    assert change[0] < 0.3 * change[1]


def test_distrusted_motion_passes_the_frame():
    a, b, fusion = texture(1), texture(2), TemporalFusion()
    alone = TemporalFusion()(b, torch.zeros(1, 3, 24, 32))
    fusion(a, torch.zeros(1, 3, 24, 32))
    assert torch.allclose(fusion(b, torch.zeros(1, 3, 24, 32)), alone, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
def test_fusion_does_not_depend_on_how_many_frames_come_at_a_time(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)
    frames, motion = torch.rand(n, 3, 32, 48, generator=generator), torch.rand(n, 3, 8, 12, generator=generator)
    whole, pieces = TemporalFusion(), TemporalFusion()
    parts = [pieces(f, m) for f, m in zip(frames.split(counts), motion.split(counts), strict=True)]
    assert torch.allclose(whole(frames, motion), torch.cat(parts), atol=1e-6)
    assert torch.allclose(whole.last, pieces.last, atol=1e-6)


def test_fusion_keeps_fine_detail_along_motion():
    base, fusion = texture(3), TemporalFusion()
    grain = torch.randn(1, 3, 96, 128) * 0.1
    motion = torch.zeros(1, 3, 24, 32)
    motion[:, 0], motion[:, 2] = -1.5 / 4, 1
    frames = [shifted(base + grain, 1.5 * i, 0) for i in range(8)]
    fused = [fusion(f, motion) for f in frames]

    def detail(x):
        return (x - F.avg_pool2d(x, 3, 1, 1))[..., 16:-16, 24:-8].square().mean()

    assert detail(fused[-1]) > 0.9 * detail(frames[-1])


@pytest.mark.parametrize("speed", [0.3, 0.7, 1.3])
def test_long_motion_grows_no_dots(speed):
    """After many fused frames there is no more of the finest checkerboard than in the frame they came from."""
    wide = (texture(3, 96, 256) > 0.5).float() * 0.6 + 0.2
    motion = torch.zeros(1, 3, 24, 32)
    motion[:, 0], motion[:, 2] = -speed / 4, 1
    frames = [shifted(wide, speed * i, 0)[..., 100:228] for i in range(60)]
    kernel = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).expand(3, 1, 2, 2) / 4

    def dots(x):
        return F.conv2d(x, kernel, groups=3)[..., 16:-16, 16:-16].square().mean()

    fusion = TemporalFusion()
    last = [fusion(f, motion) for f in frames][-1]
    assert dots(last) < 1.2 * dots(frames[-1])


def test_flow_weights_that_are_missing_are_named(tmp_path):
    with pytest.raises(ModelError, match="gone.safetensors"):
        load_flow(torch.device("cpu"), tmp_path / "gone.safetensors")
    assert sum(p.numel() for p in FlowNet().parameters()) < 1.2e6
