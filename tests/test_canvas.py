"""The editor of a real ComfyUI in Chromium: drop, run, preview, video, the graph back from its MP4, help, languages.

Needs COMFYUI_PATH, playwright and a Chromium. VEOSTYLE_SCREENSHOTS names a folder for pictures of every step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest
from comfyui_veostyle.workflows.editor import TITLES, browser_path
from comfyui_veostyle.workflows.editor import opened as opened_editor

from .comfy_server import CORE_LOADERS, small
from .conftest import EXAMPLES, ROOT

WORKFLOWS = sorted(p.stem for p in (ROOT / "workflows" / "api").glob("*.json"))
pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


@pytest.fixture
def editor(server, request):
    """An editor on the canvas; ``locale`` as its parameter."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    if browser_path() is None:
        pytest.skip("no Chromium on this machine")
    with opened_editor(f"http://127.0.0.1:{server.port}", (1700, 1000), getattr(request, "param", None)) as opened:
        opened.server = server
        opened.name = request.node.name.replace("/", "_")
        yield opened
        shoot(opened, "end")
        assert not [e for e in opened.errors if "an-odd-name_2" in e or "load_video.js" in e]


def shoot(editor, step):
    if folder := os.environ.get("VEOSTYLE_SCREENSHOTS"):
        editor.page.screenshot(path=Path(folder) / f"{editor.name}_{step}.png")


def drop_small(editor, name, tmp_path, **changes):
    """Drops a shipped workflow with the changes that ``small`` makes, and some more by input name."""
    shipped = json.loads((ROOT / "workflows" / f"{TITLES[name]}.json").read_text())
    for node in shipped["nodes"]:
        if node["type"] in CORE_LOADERS:
            node["type"] = f"Tiny{node['type']}"
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(shipped))
    editor.drop(file)
    api = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())
    changed = small(api, editor.server.base)
    values = {
        k: {i: v for i, v in n["inputs"].items() if v != api[k]["inputs"].get(i)} | changes for k, n in changed.items()
    }
    editor.page.evaluate(
        """values => { for (const [id, inputs] of Object.entries(values))
          for (const widget of app.graph.getNodeById(Number(id)).widgets ?? [])
            if (widget.name in inputs) { widget.value = inputs[widget.name]; widget.callback?.(widget.value); } }""",
        values,
    )


def place_of(editor, kind, x, y):
    """Where on the page a point of the first node of a kind is."""
    return editor.page.evaluate(
        """([type, x, y]) => { const n = app.graph.nodes.find(n => n.type === type), ds = app.canvas.ds;
          const r = app.canvas.canvas.getBoundingClientRect();
          return [(n.pos[0] + x + ds.offset[0]) * ds.scale + r.left, (n.pos[1] + y + ds.offset[1]) * ds.scale + r.top]; }""",
        [kind, x, y],
    )


def saved_file(editor, detail):
    """The first file that a run saved."""
    history = editor.server.get(f"/history/{detail['prompt_id']}")[detail["prompt_id"]]
    files = [f for out in history["outputs"].values() for f in out.get("images", []) if f["type"] == "output"]
    return editor.server.base / "output" / files[0]["subfolder"] / files[0]["filename"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_is_dropped_and_runs(editor, tmp_path, name):
    editor.drop(ROOT / "workflows" / f"{TITLES[name]}.json")
    shoot(editor, "dropped")
    shipped = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())
    queued = editor.prompt()
    assert {k: n["class_type"] for k, n in queued.items()} == {k: n["class_type"] for k, n in shipped.items()}
    for key, node in shipped.items():
        if node["class_type"].startswith("VeoStyle"):
            assert queued[key]["inputs"].items() >= node["inputs"].items(), key
    drop_small(editor, name, tmp_path)
    wanted = [n["type"] for n in json.loads((tmp_path / f"{name}.json").read_text())["nodes"]]
    assert sorted(editor.types()) == sorted(wanted)
    event, detail = editor.run()
    assert event == "execution_success", detail
    assert saved_file(editor, detail).exists()


def test_progress_and_preview_are_shown_while_it_runs(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path, file="city.mp4", width=256, frame_cap=40)
    editor.page.evaluate(
        """() => { window.told = []; window.previews = 0;
          app.api.addEventListener("progress_text", (e) => window.told.push(e.detail.text));
          app.api.addEventListener("b_preview", () => window.previews++);
          app.api.addEventListener("b_preview_with_metadata", () => window.previews++); }"""
    )
    editor.start()
    editor.page.wait_for_function("window.previews > 0", timeout=120_000)
    editor.page.wait_for_timeout(700)
    shoot(editor, "running")
    editor.page.wait_for_function("window.ended", timeout=240_000)
    told = editor.page.evaluate("window.told")
    assert any(t.startswith("stylising: frame") and "fps" in t and "left" in t for t in told), told
    assert any(t.startswith("writing: frame 40 of 40") for t in told), told


def test_the_saved_video_brings_the_graph_back(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path, strength=0.77)
    before = editor.prompt()
    _, detail = editor.run()
    video = saved_file(editor, detail)
    assert video.suffix == ".mp4"
    editor.page.evaluate("app.graph.clear()")
    editor.drop(video, "video/mp4")
    assert editor.prompt() == before
    assert "VeoStyleSTNormDenoiser" in editor.types()


def test_the_loader_s_preview_follows_its_settings(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path, file="bunny.mp4", start=1.0, duration=2.0, width=200)
    node = "app.graph.nodes.find(n => n.type === 'VeoStyleLoadVideo')"
    box = f"{node}.widgets.find(w => w.name === 'veostyle_preview').element"
    height = editor.page.evaluate(f"{node}.size[1]")
    editor.page.wait_for_function(f"/read as 200x112[^]*cut/.test({box}.textContent)", timeout=60_000)
    facts = editor.page.evaluate(f"{box}.textContent")
    assert "bunny.mp4: 512x288" in facts
    assert "1 cut: 0.75 s" in facts
    assert editor.page.evaluate(f"{node}.size[1]") == height
    editor.page.wait_for_function(f"{box}.querySelector('video').readyState > 1", timeout=30_000)
    assert abs(editor.page.evaluate(f"{box}.querySelector('video').duration") - 2) < 0.1
    shoot(editor, "trimmed")
    editor.page.evaluate(
        f"() => {{ const w = {node}.widgets.find(w => w.name === 'start'); w.value = 99; w.callback(99); }}"
    )
    editor.page.wait_for_function(f"{box}.textContent.includes('start = 99')", timeout=30_000)
    values = next(n for n in editor.workflow()["nodes"] if n["type"] == "VeoStyleLoadVideo")["widgets_values"]
    assert len([v for v in values if v is not None]) == 11


def test_a_video_dropped_on_the_loader_is_uploaded(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path)
    video = tmp_path / "dropped here.mp4"
    video.write_bytes((EXAMPLES / "bunny.mp4").read_bytes())
    place = place_of(editor, "VeoStyleLoadVideo", 60, 40)
    editor.drop(video, "video/mp4", *place)
    loader = next(n for n in editor.prompt().values() if n["class_type"] == "VeoStyleLoadVideo")
    assert loader["inputs"]["file"] == "dropped here.mp4"
    assert (editor.server.base / "input" / "dropped here.mp4").exists()


def test_an_error_is_shown_with_its_remedy(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path, start=99.0)
    event, detail = editor.run()
    shoot(editor, "error")
    assert event == "execution_error"
    assert detail["node_type"] == "VeoStyleLoadVideo"
    assert "Lower start" in detail["exception_message"]


def test_the_memory_plan_is_shown_before_the_run(editor, tmp_path):
    drop_small(editor, "low_memory", tmp_path)
    event, detail = editor.run()
    assert event == "execution_success"
    outputs = editor.server.get(f"/history/{detail['prompt_id']}")[detail["prompt_id"]]["outputs"]
    assert outputs["5"]["images"]
    assert outputs["8"]["images"]
    drop_small(editor, "low_memory", tmp_path, budget_gb=0.1)
    event, detail = editor.run()
    assert event == "execution_error"
    assert "smallest that works" in detail["exception_message"]
    # Newer editors show the words after a click.
    if (details := editor.page.get_by_text("View details")).count():
        details.first.click()
        editor.page.wait_for_timeout(1500)
    shoot(editor, "refused")
    assert editor.page.get_by_text("the smallest that works is").count()


def test_templates_show_the_workflows(editor):
    assert "an-odd-name_2" in editor.server.get("/api/workflow_templates")
    assert sorted(editor.server.get("/api/workflow_templates")["an-odd-name_2"]) == sorted(TITLES.values())
    for name in WORKFLOWS:
        shipped = editor.server.get(f"/api/workflow_templates/an-odd-name_2/{quote(TITLES[name])}.json")
        assert shipped == json.loads((ROOT / "workflows" / f"{TITLES[name]}.json").read_text())
    editor.page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    editor.page.wait_for_timeout(2500)
    editor.page.get_by_text("an-odd-name_2").first.click()
    editor.page.wait_for_timeout(2000)
    shoot(editor, "templates")
    thumbnails = "[...document.querySelectorAll('img')].filter((i) => i.naturalWidth === 480).length"
    assert editor.page.evaluate(thumbnails) >= 3
    editor.page.get_by_text("01 Stylize a video", exact=True).first.click()
    editor.page.wait_for_timeout(2500)
    assert "VeoStyleSTNormDenoiser" in editor.types()


@pytest.mark.parametrize("node_id", ["VeoStyleSTNormDenoiser", "VeoStyleMemoryPool"])
def test_help_is_shown(editor, node_id):
    editor.page.evaluate(
        """type => { app.graph.clear(); const n = LiteGraph.createNode(type); app.graph.add(n);
          n.pos = [500, 300]; app.canvas.draw(true, true); }""",
        node_id,
    )
    editor.page.mouse.click(*place_of(editor, node_id, 90, -15))
    editor.page.locator('[data-testid="info-button"]').first.click()
    editor.page.wait_for_timeout(2500)
    shoot(editor, "help")
    assert editor.page.get_by_text("Good to know").count()
    picture = f"img[src*='{node_id}.jpg']"
    assert editor.page.evaluate("s => document.querySelector(s)?.naturalWidth > 100", picture)


@pytest.mark.parametrize("editor", ["zh"], indirect=True)
def test_chinese(editor, tmp_path):
    drop_small(editor, "stylize_video", tmp_path)
    editor.fit()
    shoot(editor, "chinese")
    told = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text())
    titles = editor.page.evaluate("app.graph.nodes.map(n => [n.type, n.title, n.constructor.title])")
    ours = [t for t in titles if t[0].startswith("VeoStyle")]
    assert all(told[kind]["display_name"] in (title, made) for kind, title, made in ours), ours
    labels = editor.page.evaluate(
        "app.graph.nodes.find(n => n.type === 'VeoStyleLoadVideo').widgets.map(w => w.label ?? w.name)"
    )
    assert told["VeoStyleLoadVideo"]["inputs"]["every_nth"]["name"] in labels
