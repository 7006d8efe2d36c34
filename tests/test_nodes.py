"""The nodes against a double of ComfyUI: schemas that never change, a whole graph, interruption, errors in words."""

import asyncio
import importlib
import json
import shutil
import sys
import threading
import time

import pytest
import torch
from comfyui_veostyle.veo_core.errors import InputError
from comfyui_veostyle.veo_core.progress import Progress
from comfyui_veostyle.workflows.editor import TITLES

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


def load(state, file="in.mp4", **settings):
    """Load Video with its defaults."""
    node = state.nodes["VeoStyleLoadVideo"]
    defaults = {p.id: p.settings.get("default") for p in node.define_schema().inputs}
    return node.execute(**defaults | {"file": file} | settings)


def schema_facts(node):
    schema = node.define_schema()
    inputs = [[p.id, p.kind, bool(p.optional)] for p in schema.inputs]
    return {"inputs": inputs, "outputs": [[p.kind, p.settings.get("display_name")] for p in schema.outputs]}


def node_texts(node):
    """What the editor shows of a node, in the form of a nodeDefs.json."""
    schema = node.define_schema()

    def told(port, name):
        return {"name": name} | ({"tooltip": t} if (t := port.settings.get("tooltip")) else {})

    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {p.id: told(p, p.id) for p in schema.inputs},
        "outputs": {str(i): told(p, p.settings["display_name"]) for i, p in enumerate(schema.outputs)},
    }


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
        assert all(p.settings.get("tooltip") for p in [*schema.inputs, *schema.outputs]), schema.node_id


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_text_is_in_every_language(comfy, language):
    """English is what the schemas say; another language says something of its own for each of it."""
    told = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text())
    texts = {node_id: node_texts(node) for node_id, node in comfy.nodes.items()}
    if language == "en":
        assert told == texts
        return
    assert set(told) == set(texts)
    for node_id, node in texts.items():
        assert told[node_id]["display_name"] != node["display_name"]
        assert told[node_id]["description"] != node["description"]
        for kind in ("inputs", "outputs"):
            assert set(told[node_id][kind]) == set(node[kind]), node_id
            for name, port in node[kind].items():
                assert told[node_id][kind][name]["name"]
                assert told[node_id][kind][name]["tooltip"] != port["tooltip"], (node_id, name)


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
    audio = load(comfy, "in.mp4").args[1]
    assert audio._decoded is None
    assert audio["waveform"].shape[:2] == (1, 2)
    assert set(audio) == {"waveform", "sample_rate"}


def test_video_without_sound_has_none(comfy, tmp_path):
    shutil.copy(EXAMPLES / "city.mp4", tmp_path / "input" / "city.mp4")
    clip, audio, info = load(comfy, "city.mp4").args
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
        load(comfy, "in.mp4", start=99.0)
    with pytest.raises(InputError, match="not finite"):
        comfy.nodes["VeoStyleEncoder"].execute(1.0, torch.full((1, 64, 64, 3), float("nan")))


WORKFLOWS = sorted(p.stem for p in (ROOT / "workflows" / "api").glob("*.json"))
FOLDERS = ("checkpoints", "diffusion_models", "text_encoders", "vae", "clip_vision", "ipadapter")
WIDGETS = ("INT", "FLOAT", "STRING", "COMBO", "BOOLEAN")


def workflow(name):
    """A shipped workflow in its forms: of the queue, of the editor."""
    return tuple(
        json.loads((ROOT / "workflows" / f"{file}.json").read_text()) for file in (f"api/{name}", TITLES[name])
    )


def test_every_node_has_help_with_a_picture_and_a_workflow(comfy):
    """The help names every input and output by its name; a picture of the node is there."""
    used = {n["class_type"] for name in WORKFLOWS for n in workflow(name)[0].values()}
    for node_id, node in comfy.nodes.items():
        assert node_id in used
        schema, text = node.define_schema(), (ROOT / "web" / "docs" / f"{node_id}.md").read_text()
        assert text.startswith(f"# {schema.display_name}\n")
        rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
        names = [p.id for p in schema.inputs] + [p.settings["display_name"] for p in schema.outputs]
        assert [r for r in rows if r not in ("input", "output")] == names, node_id
        assert f"](images/{node_id}.jpg)" in text
        assert (ROOT / "web" / "docs" / "images" / f"{node_id}.jpg").stat().st_size > 2000
    assert {p.stem for p in (ROOT / "web" / "docs").glob("*.md")} == set(comfy.nodes)


def test_every_workflow_has_all_its_forms():
    folder = ROOT / "workflows"
    assert sorted(TITLES) == WORKFLOWS
    titles = sorted(TITLES.values())
    assert titles == sorted(p.stem for p in folder.glob("*.json")) == sorted(p.stem for p in folder.glob("*.jpg"))
    assert len(WORKFLOWS) > 8


@pytest.mark.parametrize("name", WORKFLOWS)
def test_queued_workflow_fits_the_schemas(comfy, name):
    """Ids, required inputs, types of links, ranges and choices."""
    api, _ = workflow(name)
    for node in api.values():
        if node["class_type"] in comfy.nodes:
            _check_api_node(comfy, api, comfy.nodes[node["class_type"]].define_schema(), node["inputs"])


def _check_api_node(comfy, api, schema, inputs):
    ports = {p.id: p for p in schema.inputs}
    assert set(inputs) <= set(ports)
    assert {p.id for p in schema.inputs if not p.optional} <= set(inputs)
    for name, value in inputs.items():
        if not isinstance(value, list):
            _check_value(ports[name], value)
        elif api[value[0]]["class_type"] in comfy.nodes:
            source = comfy.nodes[api[value[0]]["class_type"]].define_schema()
            assert source.outputs[value[1]].kind == ports[name].kind


def _check_value(port, value):
    kinds = {"INT": int, "FLOAT": (int, float), "STRING": str, "COMBO": str, "BOOLEAN": bool}
    assert isinstance(value, kinds[port.kind]), port.id
    settings = port.settings
    if port.id != "file" and not str(value).endswith(".safetensors"):
        assert value in settings.get("options", [value]), port.id
    assert settings.get("min", value) <= value <= settings.get("max", value), port.id


@pytest.mark.parametrize("name", WORKFLOWS)
def test_editor_s_workflow_is_that_of_the_queue(comfy, name):
    """The same nodes, values by their place, links; ids and versions for the manager; nothing lies on anything else."""
    api, editor = workflow(name)
    nodes = {str(n["id"]): n for n in editor["nodes"] if n["type"] != "Note"}
    links = {link[0]: [str(link[1]), link[2]] for link in editor["links"]}
    assert {k: n["type"] for k, n in nodes.items()} == {k: n["class_type"] for k, n in api.items()}
    for key, node in nodes.items():
        assert node["properties"]["cnr_id"] in ("comfyui-veostyle", "comfy-core")
        assert node["properties"]["ver"]
        linked = {i["name"]: links[i["link"]] for i in node["inputs"] if i.get("link") is not None}
        assert linked == {k: v for k, v in api[key]["inputs"].items() if isinstance(v, list)}
        if node["type"] not in comfy.nodes:
            continue
        schema = comfy.nodes[node["type"]].define_schema()
        assert {i["name"] for i in node["inputs"]} <= {p.id for p in schema.inputs} | {"upload"}
        values = iter(node.get("widgets_values", []))
        for port in (p for p in schema.inputs if p.kind in WIDGETS):
            value = next(values)
            _check_value(port, value)
            assert value == api[key]["inputs"].get(port.id, port.settings.get("default")), port.id
            if port.settings.get("control_after_generate"):
                assert next(values) == "fixed"


def test_workflows_name_their_models_where_the_editor_looks():
    """Those without any stand first; a title says what the others need, and each file that is not the user's own has its
    folder and address."""
    needs = []
    for name in sorted(WORKFLOWS, key=TITLES.get):
        api, editor = workflow(name)
        files = {v for n in api.values() for v in n["inputs"].values() if str(v).endswith(".safetensors")}
        needs.append(bool(files))
        assert ("(needs " in TITLES[name]) == bool(files)
        named = [m for n in editor["nodes"] for m in n["properties"].get("models", [])]
        assert {m["name"] for m in named} == files - {"style_a.safetensors", "style_b.safetensors"}
        assert all(m["url"].startswith("https://") and m["url"].endswith("/" + m["name"]) for m in named)
        assert {m["directory"] for m in named} <= set(FOLDERS)
        assert sorted({m["name"] for m in named}) == sorted(m["name"] for m in editor.get("models", []))
    assert needs == sorted(needs)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nothing_lies_on_anything_else(name):
    _, editor = workflow(name)
    boxes = {f"{n['type']} {n['id']}": (*n["pos"], *n["size"]) for n in editor["nodes"]}
    # A node's title stands above its place.
    boxes = {k: (x, y - 30, x + w, y + h) for k, (x, y, w, h) in boxes.items()}
    for one, a in boxes.items():
        for other, b in boxes.items():
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert one == other or apart, f"{one} lies on {other}"
    groups = [(x, y, x + w, y + h) for x, y, w, h in (g["bounding"] for g in editor["groups"])]
    for name, a in boxes.items():
        inside = [b for b in groups if b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]]
        assert len(inside) == (0 if name.startswith("Note") else 1), name


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
    assert "lora = none" in checkpoint.nodes["VeoStyleLoRAInjector"].validate_inputs("none")
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


def test_memory_is_planned_before_and_reported_after(comfy):
    """The pool's plan is the one that runs; the report knows every stage; a budget too small stops before anything runs."""
    from comfyui_veostyle.veo_core.errors import BudgetError

    nodes = comfy.nodes
    model = nodes["VeoStyleLoadModel"].execute("veo-mini").args[0]
    clip = load(comfy).args[0]
    style = nodes["VeoStyleEncoder"].execute(1.0, torch.rand(1, 64, 64, 3)).args[0]
    memory, words, picture = nodes["VeoStyleMemoryPool"].execute(model, clip, 2.0, "lean").args
    assert "decodes 1 frames" in words
    assert picture.shape[0] == 1
    with pytest.raises(InputError, match="VAE Decode"):
        nodes["VeoStyleMemoryReport"].execute(memory)
    latent = nodes["VeoStyleSTNormDenoiser"].execute(model, clip, style, 0, 0.0, 1.0, 0, memory=memory).args[0]
    video, measured = nodes["VeoStyleVAEDecode"].execute(latent, model, codec="vp9", crf=40).args
    assert video.path.endswith(".webm")
    assert measured.plan.describe() == words
    timeline, text = nodes["VeoStyleMemoryReport"].execute(measured).args
    assert timeline.shape[0] == 1
    assert all(stage in text for stage in ("encode", "denoise", "decode"))
    with pytest.raises(BudgetError, match="smallest that works"):
        nodes["VeoStyleMemoryPool"].execute(model, clip, 0.01, "fast")


def test_scenes_are_shown(comfy):
    shutil.copy(EXAMPLES / "bunny.mp4", comfy.root / "input" / "bunny.mp4")
    shown = comfy.nodes["VeoStyleScenes"].execute(load(comfy, "bunny.mp4").args[0])
    sheet, text = shown.args
    assert shown.ui["images"] == tuple(sheet.shape)
    assert "4 scenes" in text
    assert comfy.texts[-1] == text


@pytest.mark.parametrize(("format", "name"), [("auto", "a_00001_.mp4"), ("ffv1", "a_00001_.mkv"), ("png", "a_00001_")])
def test_saved_videos_carry_the_workflow(comfy, format, name):
    import av

    from .comfy_double import VideoFromFile

    video = VideoFromFile(str(comfy.root / "input" / "in.mp4"))
    saved = comfy.nodes["VeoStyleSaveVideo"].execute(video, "sub/a", format)
    path = comfy.root / "output" / "sub" / name
    assert saved.args == (str(path),)
    result = saved.ui["images"][-1]
    assert (comfy.root / result["type"] / result["subfolder"] / result["filename"]).exists()
    if format == "png":
        assert len(list(path.iterdir())) == 14
        return
    if format == "ffv1":
        assert saved.ui["images"][0]["type"] == "temp"
        return
    with av.open(path) as container:
        assert json.loads(container.metadata["workflow"]) == {"nodes": []}
        assert json.loads(container.metadata["prompt"]) == {"1": {}}
        assert container.streams.audio


def test_metadata_is_left_out_where_comfyui_leaves_it_out(comfy):
    from comfyui_veostyle.nodes.files import workflow_tags

    assert set(workflow_tags(comfy.nodes["VeoStyleSaveVideo"].hidden)) == {"workflow", "prompt"}
    sys.modules["comfy.cli_args"].args.disable_metadata = True
    assert workflow_tags(comfy.nodes["VeoStyleSaveVideo"].hidden) == {}


def test_source_and_result_are_compared_with_sound(comfy):
    from fractions import Fraction

    from comfyui_veostyle.veo_core.video.reader import open_clip

    from .comfy_double import VideoFromComponents

    clip = load(comfy).args[0]
    sound = {"waveform": torch.zeros(1, 1, 8000), "sample_rate": 16000}
    result = VideoFromComponents(torch.rand(14, 64, 96, 3), sound, Fraction(24))
    video = comfy.nodes["VeoStyleCompare"].execute(clip, result, "side_by_side").args[0]
    made = open_clip(video.path)
    assert made.size == (192, 64)
    assert made.info.audio


def test_blend_over_scenes(comfy):
    encode, blend = comfy.nodes["VeoStyleEncoder"].execute, comfy.nodes["VeoStyleBlend"].execute
    a, b = (encode(1.0, torch.rand(1, 32, 32, 3)).args[0] for _ in range(2))
    assert blend(a, b, 0.25).args[0].weights == (0.75, 0.25)
    assert [s.weights for s in blend(a, b, 0.25, " 0, 0.5, 1 ").args[0].by_scene] == [(1.0,), (0.5, 0.5), (1.0,)]
    with pytest.raises(InputError, match="scenes"):
        blend(a, b, 0.25, "half")


def test_a_changed_file_runs_again_and_a_missing_one_is_told_before(checkpoint):
    nodes, root = checkpoint.nodes, checkpoint.root
    for node_id, own, file in (
        ("VeoStyleLoadModel", {"model": "mine.safetensors"}, "models/checkpoints/mine.safetensors"),
        ("VeoStyleLoRAInjector", {"lora": "a.safetensors", "strength": 1.0}, "models/loras/a.safetensors"),
        ("VeoStyleIPAdapter", {"path": str(root / "ip.safetensors"), "clip_vision": "h.safetensors"}, "ip.safetensors"),
    ):
        fingerprint = nodes[node_id].fingerprint_inputs
        before = fingerprint(**own)
        assert fingerprint(**own) == before
        (root / file).write_bytes(b"x")
        assert fingerprint(**own) != before
        named = {k: v for k, v in own.items() if k in ("model", "lora", "clip_vision")}
        assert nodes[node_id].validate_inputs(**named, path=str(root / "ip.safetensors")) is True
        assert "path = /gone does not exist" in nodes[node_id].validate_inputs(**named, path="/gone")


def test_a_file_that_is_not_in_its_folder_is_told_with_the_folder_and_what_to_do(checkpoint):
    nodes, models = checkpoint.nodes, checkpoint.root / "models"
    encoder = {"clip_vision": "h.safetensors"}
    for node_id, field, folder, more in (
        ("VeoStyleLoadModel", "model", "checkpoints", {}),
        ("VeoStyleLoRAInjector", "lora", "loras", {}),
        ("VeoStyleIPAdapter", "ip_adapter", "ipadapter", encoder | {"path": ""}),
        ("VeoStyleIPAdapter", "clip_vision", "clip_vision", {"path": str(checkpoint.root / "ip.safetensors")}),
    ):
        check = nodes[node_id].validate_inputs
        told = check(**more | {field: "gone.safetensors"})
        assert told.startswith(f"{field} = gone.safetensors is not in"), told
        assert str(models / folder) in told
        assert "another" in told
    for node_id, field, more in (
        ("VeoStyleLoRAInjector", "lora", {}),
        ("VeoStyleIPAdapter", "ip_adapter", encoder | {"path": ""}),
    ):
        assert nodes[node_id].validate_inputs(**more | {field: "none"}).startswith(f"{field} = none: choose a file")
    assert nodes["VeoStyleLoadModel"].validate_inputs(model="mine.safetensors") is True
    assert nodes["VeoStyleLoadModel"].validate_inputs(model="veo-mini") is True


def test_an_ip_adapter_from_the_list_is_the_one_of_that_path(checkpoint):
    folder = checkpoint.root / "models" / "ipadapter"
    folder.mkdir()
    shutil.copy(checkpoint.root / "ip.safetensors", folder / "plain.safetensors")
    node = checkpoint.nodes["VeoStyleIPAdapter"]
    assert node.validate_inputs(path="", clip_vision="h.safetensors", ip_adapter="plain.safetensors") is True
    (model,) = checkpoint.nodes["VeoStyleLoadModel"].execute("mine.safetensors").args
    settings = {"clip_vision": "h.safetensors", "blocks": "all"}
    listed = node.execute(model, path="", **settings, ip_adapter="plain.safetensors").args[0]
    given = node.execute(model, path=str(checkpoint.root / "ip.safetensors"), **settings).args[0]
    assert listed.engine.backbone.digest == given.engine.backbone.digest


def test_a_veo_mini_file_is_loaded_by_its_path(comfy):
    from comfyui_veostyle.veo_core.backbones.mini.backbone import BUNDLED

    assert (
        comfy.nodes["VeoStyleLoadModel"].execute("veo-mini", path=str(BUNDLED)).args[0].engine.backbone.name
        == "veo-mini"
    )


@pytest.mark.parametrize(
    ("package", "lost"),
    [("open_clip", {"VeoStyleIPAdapter"}), ("transformers", {"VeoStyleIPAdapter", "VeoStyleLoRAInjector"})],
)
def test_a_missing_package_loses_its_nodes_alone_and_says_so(comfy, monkeypatch, caplog, package, lost):
    module = sys.modules["comfyui_veostyle.nodes"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    left = {n.define_schema().node_id for n in module.available_nodes()}
    assert set(comfy.nodes) - left == lost
    assert all(package in record.message for record in caplog.records)
    assert len(caplog.records) == len(lost)


def ask(comfy, route, body):
    """What a route of the pack answers."""
    from types import SimpleNamespace

    async def read():
        return body

    answer = asyncio.run(comfy.routes[f"/veostyle/{route}"](SimpleNamespace(json=read)))
    return answer.status, json.loads(answer.body)


def test_the_editor_is_told_a_clip_s_facts_and_cuts(comfy):
    shutil.copy(EXAMPLES / "bunny.mp4", comfy.root / "input" / "bunny.mp4")
    settings = {"file": "bunny.mp4", "start": 1.0, "width": 200}
    status, told = ask(comfy, "preview", {"asker": "1", "settings": settings})
    assert status == 200
    assert "read as 200x112" in told["facts"]
    assert (comfy.root / "temp" / told["file"]).exists()
    status, told = ask(comfy, "cuts", {"asker": "1", "settings": {"file": "bunny.mp4", "start": 1.0, "duration": 2.0}})
    assert (status, told["cuts"], told["whole"]) == (200, [0.75], True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"file": "gone.mp4"}, "does not exist"),
        ({"file": "in.mp4", "start": 99}, "start = 99"),
        ({"file": "in.mp4", "fit": "bogus"}, "fit = bogus"),
        ({"file": "in.mp4", "start": "soon"}, "str"),
        ({"file": None}, ""),
        ({"path": "/" + "x" * 5000}, "too long"),
        ({"nothing": 1}, "nothing"),
        ("text", ""),
    ],
)
def test_the_editor_is_told_what_is_wrong(comfy, settings, says):
    for route in ("preview", "cuts"):
        status, told = ask(comfy, route, {"asker": "1", "settings": settings})
        assert status == 400
        assert says in told["error"]
        assert ask(comfy, route, {"settings": settings}) == (400, {"error": "'asker' is missing"})
        assert ask(comfy, route, [])[0] == 400


def test_a_newer_request_of_a_node_ends_the_older(comfy):
    from comfyui_veostyle.nodes.routes import Jobs, Superseded

    async def race():
        jobs, begun = Jobs(), threading.Event()

        def long(check):
            begun.set()
            while True:
                check()
                time.sleep(0.01)

        older = asyncio.ensure_future(jobs.run("preview", "a", long))
        other = asyncio.ensure_future(jobs.run("preview", "b", lambda check: {"who": "b"}))
        await asyncio.to_thread(begun.wait)
        newer = await jobs.run("preview", "a", lambda check: {"who": "a"})
        with pytest.raises(Superseded):
            await older
        return newer, await other, jobs._newest

    assert asyncio.run(race()) == ({"who": "a"}, {"who": "b"}, {})


@pytest.mark.parametrize(
    ("node_id", "inputs"),
    [
        ("VeoStyleLoadVideo", {"file": "", "path": None}),
        ("VeoStyleLoadVideo", {"file": None}),
        ("VeoStyleLoadModel", {"model": None}),
        ("VeoStyleLoadModel", {"model": "veo-mini", "path": None}),
        ("VeoStyleLoRAInjector", {"lora": None}),
        ("VeoStyleLoRAInjector", {"lora": "none", "path": None}),
        ("VeoStyleIPAdapter", {"path": None, "clip_vision": None}),
    ],
)
def test_what_another_node_gives_is_not_looked_at_before_it_is_there(comfy, node_id, inputs):
    import inspect

    node = comfy.nodes[node_id]
    names = inspect.signature(node.validate_inputs).parameters
    assert node.validate_inputs(**{k: v for k, v in inputs.items() if k in names}) is True
    assert node.fingerprint_inputs(**inputs) == ""


def test_progress_says_stage_frame_speed_and_time_left(comfy, monkeypatch):
    from comfyui_veostyle.nodes import progress as module

    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monitor = module.CanvasMonitor("7")
    for done in (28, 32, 36):
        monitor(Progress("encode", done + 8, 100, resumed=28))
        monitor(Progress("denoise", done, 100, resumed=28))
    assert comfy.texts[-1].startswith("stylising: frame 36 of 100, resumed at frame 28, ")
    assert all(text.startswith("stylising: ") for text in comfy.texts)
    assert "fps" in comfy.texts[-1]
    assert comfy.texts[-1].endswith(" left")
    assert comfy.updates[-1][:2] == (36, 100)
    comfy.interrupted = True
    with pytest.raises(comfy_double.Interrupted):
        monitor(Progress("denoise", 37, 100))


@pytest.mark.parametrize(
    ("node_id", "inputs", "says"),
    [
        ("VeoStyleSTNormDenoiser", {"window": 1}, "window = 1"),
        ("VeoStyleSTNormDenoiser", {"knobs": "quarry=0.5"}, "knob 'quarry=0.5'"),
        ("VeoStyleEncoder", {"text": "@nowhere at night"}, "'@nowhere at night'"),
        ("VeoStyleBlend", {"scenes": "half"}, "scenes = 'half'"),
        ("VeoStyleVAEDecode", {"codec": "png"}, "codec = png"),
        ("VeoStyleVAEDecode", {"codec": "ffv1", "crf": 20}, "crf = 20"),
        ("VeoStyleSaveVideo", {"format": "gif", "deep": True}, "gif has no 10-bit form"),
        ("VeoStyleLoRAInjector", {"lora": "none"}, "lora = none"),
        ("VeoStyleLoRAInjector", {"lora": "none", "path": "/", "steps": "9:1"}, "steps = '9:1'"),
        ("VeoStyleLoRAInjector", {"lora": "none", "path": "/", "scenes": "a"}, "scenes = 'a'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(comfy, node_id, inputs, says):
    """Each on its node; what another node gives is None then, and is not looked at."""
    validate = comfy.nodes[node_id].validate_inputs
    assert says in validate(**inputs)
    assert node_id != "VeoStyleBlend" or validate(scenes="  ") is True
    assert validate(**dict.fromkeys(inputs)) is True


def test_progress_is_told_seldom_enough(comfy):
    """Ten thousand calls in no time make few messages, and the end is among them."""
    from comfyui_veostyle.nodes import progress as module

    monitor = module.CanvasMonitor("7")
    for _ in range(10_000):
        monitor(Progress("save", 0))
    assert comfy.texts == ["saving"]
    for done in range(500):
        monitor(Progress("save", done, 500))
    for _ in range(1000):
        monitor(Progress("save", 500, 500))
    assert comfy.texts[-1].startswith("saving: frame 500 of 500")
    assert len(comfy.texts) < 20
    assert len(comfy.updates) == 501
