"""Weights: the bundled file, and files that must be refused."""

import pickle

import pytest
import torch
from comfyui_veostyle.veo_core.backbones.mini.backbone import BUNDLED, detect, load
from comfyui_veostyle.veo_core.backbones.mini.network import MiniNetwork
from comfyui_veostyle.veo_core.errors import ModelError
from comfyui_veostyle.veo_core.weights_file import read_header
from safetensors.torch import load_file, save_file


def test_bundled_weights_are_whole_and_small():
    assert BUNDLED.stat().st_size < 40_000_000
    assert detect(read_header(BUNDLED, "veo-mini"))
    state = load_file(BUNDLED)
    assert set(state) == set(MiniNetwork().state_dict())
    assert all(v.isfinite().all() for v in state.values())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "pickle"),
        (lambda p: torch.save({"a": torch.ones(1)}, p), "pickle"),
        (lambda p: p.write_bytes(BUNDLED.read_bytes()[:100_000]), "not a whole safetensors"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: save_file({"model.diffusion_model.x": torch.ones(1)}, p), "another architecture"),
        (lambda p: save_file({k: v[:1].contiguous() for k, v in load_file(BUNDLED).items()}, p), "another version"),
        (lambda p: save_file({k: v * float("nan") for k, v in load_file(BUNDLED).items()}, p), "not finite"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, make, says):
    path = tmp_path / "w.safetensors"
    make(path)
    with pytest.raises(ModelError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_digest_follows_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(BUNDLED.read_bytes())
    first = load(path).digest
    state = load_file(path)
    state["mapping.null"] += 1
    save_file(state, path)
    assert load(path).digest != first == load().digest


def test_digest_tells_large_files_apart(tmp_path):
    from comfyui_veostyle.veo_core.weights_file import digest

    seen = set()
    for i, change in enumerate((None, 0, 100 << 20, (100 << 20) + 7)):
        path = tmp_path / f"{i}.safetensors"
        with path.open("wb") as file:
            file.truncate((100 << 20) + 8)
            if change is not None:
                file.seek(change)
                file.write(b"x")
        seen.add(digest(path))
    assert len(seen) == 4
