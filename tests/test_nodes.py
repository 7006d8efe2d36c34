"""The nodes against a double of ComfyUI: schemas that never change, a whole graph, interruption, errors in words."""

import asyncio
import importlib
import json
import shutil
import sys

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError

from . import comfy_double
from .conftest import EXAMPLES, ROOT, make_pictures, make_video

SNAPSHOT = ROOT / "tests" / "node_schemas.json"


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    state = comfy_double.install(monkeypatch, tmp_path)
    for name in [n for n in sys.modules if n.startswith("comfyui_veostyle.nodes")]:
        monkeypatch.delitem(sys.modules, name)
    package = importlib.import_module("comfyui_veostyle")
    state.nodes = {
        n.define_schema().node_id: n for n in asyncio.run(asyncio.run(package.comfy_entrypoint()).get_node_list())
    }
    make_video(tmp_path / "input" / "in.mp4", 14, size=(96, 64), audio="stereo", picture=make_pictures(14, (96, 64)))
    return state


def run(state, **inputs):
    """Runs the graph of workflows/api/stylize_video.json up to the video."""
    graph = json.loads((ROOT / "workflows/api/stylize_video.json").read_text())
    results = {}
    picture = next(iter([torch.rand(1, 64, 64, 3)]))
    for key in sorted(graph, key=int):
        kind, values = graph[key]["class_type"], dict(graph[key]["inputs"])
        if not kind.startswith("VeoStyle"):
            results[key] = (picture,)
            continue
        values = {k: results[v[0]][v[1]] if isinstance(v, list) else v for k, v in values.items()}
        values |= {k: v for k, v in inputs.items() if k in values}
        results[key] = state.nodes[kind].execute(**values).args
    return results


def schema_facts(node):
    schema = node.define_schema()
    inputs = [[p.id, p.kind, bool(p.optional)] for p in schema.inputs]
    return {"inputs": inputs, "outputs": [[p.kind, p.settings.get("display_name")] for p in schema.outputs]}


def test_schemas_only_grow(comfy):
    """A saved workflow must always load: ids, types and order of what was there stay; what is new is optional."""
    saved = json.loads(SNAPSHOT.read_text())
    for node_id, old in saved.items():
        new = schema_facts(comfy.nodes[node_id])
        for before, now in zip(old["inputs"], new["inputs"], strict=False):
            assert before[:2] == now[:2], node_id
            assert now[2] or not before[2], f"{node_id}: {now[0]} was optional"
        assert len(new["inputs"]) >= len(old["inputs"])
        assert all(optional for *_, optional in new["inputs"][len(old["inputs"]) :]), node_id
        assert new["outputs"][: len(old["outputs"])] == old["outputs"], node_id


def test_every_node_is_in_the_snapshot_and_explains_itself(comfy):
    assert set(json.loads(SNAPSHOT.read_text())) == set(comfy.nodes)
    for node in comfy.nodes.values():
        schema = node.define_schema()
        assert schema.category == "VeoStyle"
        assert schema.description
        assert all(p.settings.get("tooltip") for p in schema.inputs if p.kind in ("INT", "FLOAT", "STRING", "COMBO"))


def test_graph_makes_a_video_with_sound(comfy, tmp_path):
    from comfyui_veostyle.veo_core.video.reader import open_clip

    results = run(comfy, file="in.mp4")
    latent = results["5"][0]
    assert latent["samples"].shape == (14, 32, 8, 12)
    clip = open_clip(results["6"][0].path)
    assert len(list(clip.frames())) == 14
    assert clip.info.audio
    assert comfy.loaded[-1][1] > 0
    assert any(preview for *_, preview in comfy.updates)
    assert comfy.updates[-1][0] == comfy.updates[-1][1] == 14


def test_interruption_is_not_swallowed_and_goes_on(comfy, tmp_path):
    class Later(list):
        def append(self, item):
            super().append(item)
            if len(self) == 6:
                comfy.interrupted = True

    comfy.updates = Later()
    with pytest.raises(comfy_double.Interrupted):
        run(comfy, file="in.mp4")
    comfy.interrupted, comfy.updates = False, []
    assert run(comfy, file="in.mp4")["6"]
    assert not list((tmp_path / "temp").rglob("*.part*"))


def test_frame_cap_cuts_the_sound_too(comfy):
    from comfyui_veostyle.veo_core.video.audio import clip_audio, read_waveform
    from comfyui_veostyle.veo_core.video.reader import open_clip

    video = run(comfy, file="in.mp4", frame_cap=6)["6"][0]
    assert read_waveform(clip_audio(open_clip(video.path))).samples.shape[1] < 0.35 * 48000


def test_audio_is_decoded_only_when_read(comfy):
    audio = comfy.nodes["VeoStyleLoadVideo"].execute("in.mp4", 0.0, 0.0, 0.0, 1, 0, 0, 0, "crop").args[1]
    assert audio._decoded is None
    assert audio["waveform"].shape[:2] == (1, 2)
    assert set(audio) == {"waveform", "sample_rate"}


def test_video_without_sound_has_none(comfy, tmp_path):
    shutil.copy(EXAMPLES / "city.mp4", tmp_path / "input" / "city.mp4")
    clip, audio, info = comfy.nodes["VeoStyleLoadVideo"].execute("city.mp4", 0.0, 0.0, 0.0, 1, 0, 0, 0, "crop").args
    assert audio is None
    assert "512x288" in info
    assert "no audio" in info
    assert clip.size == (512, 288)


def test_inputs_are_checked_before_work(comfy, tmp_path):
    check = comfy.nodes["VeoStyleLoadVideo"].validate_inputs
    assert check("in.mp4") is True
    assert "gone.mp4" in check("gone.mp4")
    assert "/no/such" in check("in.mp4", "/no/such")
    before = comfy.nodes["VeoStyleLoadVideo"].fingerprint_inputs("in.mp4")
    make_video(tmp_path / "input" / "in.mp4", 3)
    assert comfy.nodes["VeoStyleLoadVideo"].fingerprint_inputs("in.mp4") != before


def test_errors_speak_plainly(comfy):
    with pytest.raises(InputError, match="ST-Norm Denoiser"):
        comfy.nodes["VeoStyleVAEDecode"].execute({"samples": torch.zeros(1, 4, 8, 8)}, None)
    with pytest.raises(InputError, match="start = 99"):
        comfy.nodes["VeoStyleLoadVideo"].execute("in.mp4", 99.0, 0.0, 0.0, 1, 0, 0, 0, "crop")
    with pytest.raises(InputError, match="not finite"):
        comfy.nodes["VeoStyleEncoder"].execute(1.0, torch.full((1, 64, 64, 3), float("nan")))


def test_workflows_fit_the_schemas(comfy):
    """Ids, required inputs, ranges and choices of every shipped workflow, in both its forms."""
    for path in (ROOT / "workflows" / "api").glob("*.json"):
        for node in json.loads(path.read_text()).values():
            if node["class_type"] in comfy.nodes:
                _check_api_node(comfy.nodes[node["class_type"]].define_schema(), node["inputs"])
    for path in (ROOT / "workflows").glob("*.json"):
        assert (ROOT / "workflows" / "api" / path.name).is_file()
        for node in json.loads(path.read_text())["nodes"]:
            if node["type"] in comfy.nodes:
                schema = comfy.nodes[node["type"]].define_schema()
                named = {i["name"] for i in node["inputs"]}
                assert named <= {p.id for p in schema.inputs} | {"upload"}
                assert node["properties"]["cnr_id"] == "comfyui-veostyle"
                assert node["properties"]["ver"]


def _check_api_node(schema, inputs):
    ports = {p.id: p for p in schema.inputs}
    assert set(inputs) <= set(ports)
    assert {p.id for p in schema.inputs if not p.optional} <= set(inputs)
    for name, value in inputs.items():
        settings = ports[name].settings
        if isinstance(value, list) or name == "file":
            continue
        assert value in settings.get("options", [value])
        assert settings.get("min", value) <= value <= settings.get("max", value)


@pytest.fixture
def checkpoint(comfy):
    """A tiny SD 1.5 in ComfyUI's folders, a LoRA for it, and an IP-Adapter with its encoder."""
    from safetensors.torch import save_file

    from . import tiny
    from .test_ip_adapter import hf_state, ip_adapter_file, vision_model
    from .test_lora import kohya_file

    models = comfy.root / "models"
    for kind in ("checkpoints", "loras", "clip_vision"):
        (models / kind).mkdir(parents=True)
    made = tiny.parts()
    tiny.save_checkpoint(made, models / "checkpoints" / "mine.safetensors")
    (models / "checkpoints" / "old.ckpt").write_bytes(b"\x80\x04")
    kohya_file(models / "loras" / "a.safetensors", made.unet, 0)
    save_file(hf_state(vision_model()), models / "clip_vision" / "h.safetensors")
    ip_adapter_file(comfy.root / "ip.safetensors", made.unet)
    return comfy


def test_a_checkpoint_with_lora_and_ip_adapter(checkpoint):
    nodes, picture = checkpoint.nodes, torch.rand(1, 64, 64, 3)
    loader = nodes["VeoStyleLoadModel"]
    assert next(p for p in loader.define_schema().inputs if p.id == "model").settings["options"] == [
        "veo-mini",
        "mine.safetensors",
    ]
    clip = nodes["VeoStyleLoadVideo"].execute(
        file="in.mp4", start=0.0, duration=0.0, force_rate=0.0, every_nth=1, frame_cap=4, width=64, height=64, fit="stretch"
    ).args[0]  # fmt: skip
    style = nodes["VeoStyleEncoder"].execute(1.0, picture, "a house", "blurry").args[0]
    style = (
        nodes["VeoStyleBlend"]
        .execute(style, nodes["VeoStyleEncoder"].execute(1.0, None, "at night").args[0], 0.3)
        .args[0]
    )
    assert style.prompts.text == "(a house:1.4), (at night:0.6)"
    plain = loader.execute("mine.safetensors", "euler", "normal").args[0]
    with_lora, report = nodes["VeoStyleLoRAInjector"].execute(plain, "a.safetensors", 0.8).args
    assert "in unet" in report
    pictured = (
        nodes["VeoStyleIPAdapter"]
        .execute(with_lora, str(checkpoint.root / "ip.safetensors"), "h.safetensors", "style")
        .args[0]
    )
    results = []
    for model in (plain, with_lora, pictured, plain):
        latent = (
            nodes["VeoStyleSTNormDenoiser"]
            .execute(model, clip, style, 4, 3.0, 1.0, 5, preset="strong", denoise=0.9, window=4)
            .args[0]
        )
        results.append(latent["samples"].clone())
    assert torch.equal(results[0], results[3])
    assert not torch.allclose(results[0], results[1], atol=1e-4)
    assert not torch.allclose(results[1], results[2], atol=1e-4)
    assert nodes["VeoStyleVAEDecode"].execute(latent, plain).args[0].path.endswith(".mp4")


def test_adapters_say_where_they_belong(checkpoint):
    from comfyui_veostyle.veo_core.errors import ModelError

    mini = checkpoint.nodes["VeoStyleLoadModel"].execute("veo-mini").args[0]
    with pytest.raises(ModelError, match="veo-mini, which takes no LoRA"):
        checkpoint.nodes["VeoStyleLoRAInjector"].execute(mini, "a.safetensors", 1.0)
    with pytest.raises(InputError, match="lora = none"):
        checkpoint.nodes["VeoStyleLoRAInjector"].execute(mini, "none", 1.0)
    with pytest.raises(ModelError, match=r"old\.ckpt is a pickle"):
        checkpoint.nodes["VeoStyleLoadModel"].execute(
            "veo-mini", path=str(checkpoint.root / "models/checkpoints/old.ckpt")
        )


def test_a_node_s_ancestry_is_the_same_in_another_session(comfy):
    from comfyui_veostyle.nodes.model import ancestry

    graph = {"1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a"}}}
    graph["2"] = {"class_type": "VeoStyleModelFromComfy", "inputs": {"model": ["1", 0], "sampler_name": "euler"}}
    renumbered = {
        "7": graph["1"],
        "9": {"class_type": "VeoStyleModelFromComfy", "inputs": {"model": ["7", 0], "sampler_name": "euler"}},
    }
    assert ancestry(graph, "2") == ancestry(renumbered, "9")
    other = json.loads(json.dumps(graph).replace('"a"', '"b"'))
    assert ancestry(other, "2") != ancestry(graph, "2")


def test_ancestry_of_a_long_chain_is_quick_and_knows_the_slot(comfy):
    from comfyui_veostyle.nodes.model import ancestry

    graph = {"0": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a"}}}
    for i in range(1, 60):
        graph[str(i)] = {"class_type": "LoraLoader", "inputs": {"model": [str(i - 1), 0], "clip": [str(i - 1), 1]}}
    assert len(ancestry(graph, "59")) == 16
    other = json.loads(json.dumps(graph))
    other["5"]["inputs"]["model"] = ["4", 1]
    assert ancestry(other, "59") != ancestry(graph, "59")
    graph["1"]["inputs"]["model"] = ["59", 0]
    ancestry(graph, "59")


def test_videos_of_other_nodes_become_clips_and_back(comfy):
    """From a file, from memory, trimmed, from frames: the frames and the audio are those that went in."""
    import io
    from fractions import Fraction

    from .comfy_double import VideoFromComponents, VideoFromFile

    source = comfy.root / "input" / "in.mp4"
    clip_from, frames_of = comfy.nodes["VeoStyleClipFromVideo"].execute, comfy.nodes["VeoStyleFrames"].execute
    clip, audio = clip_from(VideoFromFile(str(source))).args
    assert clip.path == source
    assert audio["sample_rate"] == 48000
    whole = torch.stack([f.image for f in clip.frames()])
    in_memory, _ = clip_from(VideoFromFile(io.BytesIO(source.read_bytes()))).args
    assert torch.equal(torch.stack([f.image for f in in_memory.frames()]), whole)
    trimmed, _ = clip_from(VideoFromFile(str(source), trim=(0.25, 0.25))).args
    assert torch.equal(torch.stack([f.image for f in trimmed.frames()]), whole[6:12])
    images = whole.movedim(1, -1)
    sound = {"waveform": torch.zeros(1, 2, 100), "sample_rate": 8000}
    made, kept = clip_from(VideoFromComponents(images, sound, Fraction(24))).args
    assert kept is sound
    assert (torch.stack([f.image for f in made.frames()]) - whole).abs().max() < 1 / 255
    again = comfy.nodes["VeoStyleClipFromImages"].execute(images, 24.0).args[0]
    assert again.path == made.path
    assert made.nominal_rate == 24
    odd = comfy.nodes["VeoStyleClipFromImages"].execute(images[:4], 29.97).args[0]
    assert odd.nominal_rate == Fraction(30000, 1001)
    assert [f.time for f in odd.frames()] == [Fraction(1001 * i, 30000) for i in range(4)]
    assert again.path.stat().st_mtime == 0
    some = frames_of(VideoFromFile(str(source)), 3, 4).args[0]
    assert torch.equal(some, images[3:7])
    assert len(frames_of(VideoFromFile(str(source)), 12, 100).args[0]) == 2
    with pytest.raises(InputError, match="first = 14"):
        frames_of(VideoFromFile(str(source)), 14, 1)
    for wrong, says in ((images[:0], "shape"), (images * float("nan"), "finite")):
        with pytest.raises(InputError, match=says):
            comfy.nodes["VeoStyleClipFromImages"].execute(wrong, 24.0)
    with pytest.raises(InputError, match="rate"):
        comfy.nodes["VeoStyleClipFromImages"].execute(images, 1000.0)
    assert not list((comfy.root / "temp").glob("*.part*"))
