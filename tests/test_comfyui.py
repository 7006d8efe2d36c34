"""The shipped workflows in a real ComfyUI: queued headless, finished, read back; interrupted, and run again.

Needs COMFYUI_PATH: a ComfyUI folder with its own .venv in which the pack's requirements are installed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
import urllib.error
from pathlib import Path

import av
import psutil
import pytest
import torch
from comfyui_veostyle.veo_core.video.reader import open_clip
from safetensors.torch import save_file

from .comfy_server import FRAMES, SIZE, python_of, small
from .conftest import EXAMPLES, ROOT, make_video

WORKFLOWS = sorted(p.stem for p in (ROOT / "workflows" / "api").glob("*.json"))
pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def graph(**changes):
    nodes = json.loads((ROOT / "workflows/api/stylize_video.json").read_text())
    for node in nodes.values():
        node["inputs"].update({k: v for k, v in changes.items() if k in node["inputs"]})
    return nodes


def checkpoint_graph(**changes):
    """The workflow with a checkpoint, words and a LoRA in the bundled model's place."""
    nodes = graph(frame_cap=6, width=64, height=64, **changes)
    kinds = {n["class_type"]: key for key, n in nodes.items()}
    loader, encoder = nodes[kinds["VeoStyleLoadModel"]], nodes[kinds["VeoStyleEncoder"]]
    loader["inputs"] = {"model": "tiny.safetensors", "sampler": "euler", "scheduler": "normal"}
    encoder["inputs"] |= {"text": "a painted house\n@3 at night", "negative": "blurry"}
    nodes["90"] = {
        "class_type": "VeoStyleLoRAInjector",
        "inputs": {"model": [kinds["VeoStyleLoadModel"], 0], "lora": "tiny.safetensors", "strength": 0.8},
    }
    for kind in ("VeoStyleSTNormDenoiser", "VeoStyleVAEDecode"):
        nodes[kinds[kind]]["inputs"]["model"] = ["90", 0]
    nodes[kinds["VeoStyleSTNormDenoiser"]]["inputs"] |= {
        "steps": 4,
        "guidance": 3.0,
        "preset": "strong",
        "denoise": 0.8,
    }
    return nodes


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_workflow_runs(server, name):
    """As it is shipped, but smaller; what it saves can be read and has as many frames as went in."""
    nodes = small(json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text()), server.base)
    entry = server.finished(server.queue(nodes))
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    savers = [k for k, n in nodes.items() if n["class_type"] in ("VeoStyleSaveVideo", "SaveVideo")]
    assert savers
    for key in savers:
        (saved,) = (file for file in entry["outputs"][key]["images"] if file["type"] == "output")
        clip = open_clip(server.base / "output" / saved["subfolder"] / saved["filename"])
        assert len(list(clip.thumbnails())) == FRAMES
        assert clip.size == SIZE


def test_a_checkpoint_with_words_and_a_lora(server):
    for run in range(2):
        entry = server.finished(server.queue(checkpoint_graph(seed=run)))
        assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
        saved = entry["outputs"]["7"]["images"][0]
        clip = open_clip(server.base / "output" / saved["subfolder"] / saved["filename"])
        assert len(list(clip.frames())) == 6
    cached = next(m[1]["nodes"] for m in entry["status"]["messages"] if m[0] == "execution_cached")
    assert "90" in cached


def test_core_s_videos_come_in_and_frames_go_out(server):
    """Core's Load Video and Create Video as sources, and frames of the result to core's Save Image."""
    for images in (False, True):
        nodes = graph(width=128)
        kinds = {n["class_type"]: key for key, n in nodes.items()}
        denoiser, decoder = kinds["VeoStyleSTNormDenoiser"], kinds["VeoStyleVAEDecode"]
        nodes["80"] = {"class_type": "LoadVideo", "inputs": {"file": "city.mp4"}}
        nodes["81"] = {"class_type": "VeoStyleFrames", "inputs": {"video": ["80", 0], "first": 3, "count": 4}}
        nodes["82"] = {"class_type": "ImageScale", "inputs": {
            "image": ["81", 0], "upscale_method": "area", "width": 96, "height": 64, "crop": "center"}}  # fmt: skip
        nodes["83"] = {"class_type": "CreateVideo", "inputs": {"images": ["82", 0], "fps": 12.0}}
        source = {"class_type": "VeoStyleClipFromVideo", "inputs": {"video": ["83", 0]}}
        if images:
            source = {"class_type": "VeoStyleClipFromImages", "inputs": {"images": ["82", 0], "rate": 12.0}}
        nodes["84"] = source
        nodes[denoiser]["inputs"]["clip"] = ["84", 0]
        del nodes[decoder]["inputs"]["audio"]
        nodes["85"] = {"class_type": "VeoStyleFrames", "inputs": {"video": [decoder, 0], "first": 0, "count": 9}}
        nodes["86"] = {"class_type": "SaveImage", "inputs": {"images": ["85", 0], "filename_prefix": "frame"}}
        entry = server.finished(server.queue(nodes))
        assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
        assert len(entry["outputs"]["86"]["images"]) == 4
        saved = entry["outputs"]["7"]["images"][0]
        clip = open_clip(server.base / "output" / saved["subfolder"] / saved["filename"])
        assert (clip.size, float(clip.info.rate)) == ((96, 64), 12.0)


def test_the_queue_script_runs_a_folder(server, tmp_path):
    """A batch over clips with another style picture, one of them spoilt: the others come out, and it says which did not."""
    clips, out = tmp_path / "clips", tmp_path / "out"
    clips.mkdir()
    make_video(clips / "a.mp4", 4, size=(64, 64))
    make_video(clips / "b.mp4", 3, size=(64, 64))
    (clips / "spoilt.mp4").write_bytes(b"no video")
    core = Path(os.environ["COMFYUI_PATH"])
    python = python_of(core)
    command = [python, EXAMPLES / "queue_workflow.py", ROOT / "workflows/api/stylize_video.json"]
    command += ["--server", f"127.0.0.1:{server.port}", "--clips", clips, "--image", EXAMPLES / "van_gogh.jpg"]
    command += ["--output", out, "--retries", "1", "--set", "VeoStyleSTNormDenoiser.strength=0.8"]
    command += ["--set", "7.filename_prefix=batch"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "2 of 3 done" in done.stdout
    assert "spoilt.mp4: failed, VeoStyleLoadVideo" in done.stdout
    counts = sorted(len(list(open_clip(p).frames())) for p in out.iterdir())
    assert counts == [3, 4]
    wrong = subprocess.run([*command[:3], "--set", "Nope.x=1"], capture_output=True, text=True)
    assert "no node 'Nope'" in wrong.stderr


def test_a_lora_for_another_base_is_told_on_its_node(server):
    save_file(
        {f"lora_unet_single_blocks_0_linear1.lora_{x}.weight": torch.ones(2, 2) for x in ("up", "down")},
        server.base / "flux.safetensors",
    )
    nodes = checkpoint_graph()
    nodes["90"]["inputs"]["path"] = str(server.base / "flux.safetensors")
    entry = server.finished(server.queue(nodes))
    error = next(m[1] for m in entry["status"]["messages"] if m[0] == "execution_error")
    assert "FLUX" in error["exception_message"]
    assert error["node_type"] == "VeoStyleLoRAInjector"


def test_models_of_core_s_loaders(tmp_path):
    """SD 1.5, SDXL, Wan and LTXV, tiny, through core's own classes; see comfy_models.py."""
    core = Path(os.environ["COMFYUI_PATH"])
    python = python_of(core)
    environment = os.environ | {"COMFYUI_PATH": str(core), "VEOSTYLE_ROOT": str(ROOT)}
    done = subprocess.run(
        [python, "-W", "ignore", ROOT / "tests/comfy_models.py", tmp_path],
        capture_output=True,
        text=True,
        env=environment,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("REPORT ")), None)
    assert line, done.stderr[-3000:]
    report = json.loads(line.removeprefix("REPORT "))
    wrong_vae, strange, *variants = report.pop("errors")
    assert len(variants) >= 7
    for text in variants:
        assert "Connect a text-to-video MODEL" in text or "connect a text-to-video MODEL" in text
    assert "16 channels, and SD 1.5 takes 4" in wrong_vae
    assert "Flux" in strange
    assert "SD 1.5, SDXL, Wan 2.1 or 2.2 14B, Wan 2.2 5B, LTXV" in strange
    assert set(report) == {"sd15", "sdxl", "wan", "wan22", "ltxv"}
    for name, held in report.items():
        assert {k: v for k, v in held.items() if v is not True} == {}, name


def test_all_nodes_are_there(server):
    info = server.get("/object_info")
    saved = json.loads((ROOT / "tests/node_schemas.json").read_text())
    assert set(saved) <= set(info)
    for node, facts in saved.items():
        known = [*info[node]["input"].get("required", {}), *info[node]["input"].get("optional", {})]
        assert {name for name, *_ in facts["inputs"]} <= set(known)


def test_workflow_makes_a_video_with_its_workflow_inside(server):
    entry = server.finished(server.queue(graph(frame_cap=14, width=256)))
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    saved = entry["outputs"]["7"]["images"][0]
    path = server.base / "output" / saved["subfolder"] / saved["filename"]
    clip = open_clip(path)
    assert clip.size == (256, 144)
    assert len(list(clip.frames())) == 14
    with av.open(path) as container:
        assert "VeoStyleSTNormDenoiser" in container.metadata["prompt"]


def test_interrupted_it_stops_within_a_step_and_runs_again(server):
    prompt = server.queue(graph(frame_cap=60, strength=0.9))
    time.sleep(6)
    begun = time.monotonic()
    server.post("/interrupt", {})
    entry = server.finished(prompt)
    assert entry["status"]["status_str"] != "success"
    assert time.monotonic() - begun < 10
    assert server.finished(server.queue(graph(frame_cap=60, strength=0.9)))["status"]["status_str"] == "success"
    assert not list((server.base / "temp").rglob("*.part*"))


def test_second_run_takes_loader_style_and_model_from_cache(server):
    server.finished(server.queue(graph(frame_cap=5, width=128, strength=0.8)))
    entry = server.finished(server.queue(graph(frame_cap=5, width=128, strength=0.7)))
    cached = next(m[1]["nodes"] for m in entry["status"]["messages"] if m[0] == "execution_cached")
    assert {"1", "3", "4"} <= set(cached)


def test_mistakes_are_told_on_the_node(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.queue(graph(path="/no/such/video.mp4"))
    assert "/no/such/video.mp4" in refused.value.read().decode()
    entry = server.finished(server.queue(graph(start=99.0)))
    error = next(m[1] for m in entry["status"]["messages"] if m[0] == "execution_error")
    assert "start = 99" in error["exception_message"]
    assert error["node_type"] == "VeoStyleLoadVideo"


def test_twenty_interrupts_at_random_leave_nothing_behind(server):
    """The core answers and runs on, its memory is where it was, and nothing half made is left."""
    process, choose = psutil.Process(server.process.pid), random.Random(1)
    settings = {"frame_cap": 30, "width": 160}
    server.finished(server.queue(graph(strength=0.3, **settings)))
    begun = time.monotonic()
    assert server.finished(server.queue(graph(strength=0.4, **settings)))["status"]["status_str"] == "success"
    length = time.monotonic() - begun
    before, stopped = process.memory_info().rss, 0
    for number in range(20):
        prompt = server.queue(graph(strength=0.5 + number / 100, **settings))
        time.sleep(choose.uniform(0, length))
        server.post("/interrupt", {})
        stopped += server.finished(prompt)["status"]["status_str"] != "success"
        assert not list(server.base.rglob("*.part*"))
    assert stopped > 10
    assert server.finished(server.queue(graph(strength=0.9, **settings)))["status"]["status_str"] == "success"
    assert process.memory_info().rss < 1.05 * before
    temporary = [p for p in (server.base / "temp").rglob("veostyle_*.mp4") if "preview" not in p.name]
    assert temporary
    assert all(len(list(open_clip(p).thumbnails())) for p in temporary)


def test_it_loads_quietly_and_writes_nothing_elsewhere(server):
    """No node left out, no error, and no file outside ComfyUI's own folders, after all that ran here."""
    log = (server.base / "log").read_text()
    assert "an-odd-name_2" in log
    begun = log[: log.index("To see the GUI")]
    assert not [w for w in ("is left out", "IMPORT FAILED", "Traceback", "Cannot import") if w in begun]
    assert not [p for p in server.home.rglob("*") if p.is_file()]
