"""Makes the workflows of the editor out of those of the queue: api/NAME.json, laid out, with groups and notes.

    python make.py http://127.0.0.1:8188 layout [NAME ...]       # TITLE.json
    python make.py http://127.0.0.1:8188 thumbnails [NAME ...]   # TITLE.jpg, by running it
    python make.py http://127.0.0.1:8188 nodes                   # web/docs/images/NODE.jpg
    python make.py http://127.0.0.1:8188 readme                  # web/docs/images/canvas.jpg, before_and_after.webp

Needs a running ComfyUI with the pack, city.mp4 and great_wave.jpg of the samples in its input folder, playwright, and a
Chromium.
"""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import av
from editor import TITLES, Editor, opened
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parent
IMAGES = ROOT / "web" / "docs" / "images"
GAP, TITLE, WIDTH = 14, 36, 285
BLUE, GREEN, STEEL, GOLD, PURPLE, GREY = "#3f789e", "#88a040", "#557799", "#b58b2a", "#8a4a8a", "#666666"
# Room below a node's widgets for what it shows while it runs and afterwards.
ROOM = {
    "LoadImage": 0, "LoadVideo": 240, "VeoStyleSTNormDenoiser": 220, "VeoStyleVAEDecode": 220, "VeoStyleSaveVideo": 240,
    "SaveVideo": 240, "SaveImage": 200, "VeoStyleScenes": 380, "VeoStyleMemoryPool": 420, "VeoStyleMemoryReport": 400,
    "VeoStyleLoRAInjector": 110, "VeoStyleCompare": 60,
}  # fmt: skip
WIDER = {"VeoStyleMemoryPool": 60, "VeoStyleMemoryReport": 90}

HUB = "https://huggingface.co/{}/resolve/main/{}"
WAN = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
# Where the editor offers to fetch a model from: folder of ComfyUI's models, repository, path in it.
MODELS = {
    "v1-5-pruned-emaonly-fp16.safetensors": ("checkpoints", "Comfy-Org/stable-diffusion-v1-5-archive", ""),
    "sd_xl_base_1.0.safetensors": ("checkpoints", "stabilityai/stable-diffusion-xl-base-1.0", ""),
    "wan2.1_t2v_1.3B_fp16.safetensors": ("diffusion_models", WAN, "split_files/diffusion_models/"),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": ("text_encoders", WAN, "split_files/text_encoders/"),
    "wan_2.1_vae.safetensors": ("vae", WAN, "split_files/vae/"),
    "clip_vision_h.safetensors": ("clip_vision", WAN, "split_files/clip_vision/"),
    "ip-adapter_sd15.safetensors": ("ipadapter", "h94/IP-Adapter", "models/"),
}


@dataclass
class Group:
    """Nodes under a title; without nodes a note."""

    title: str
    colour: str = ""
    nodes: tuple[str, ...] = ()


def note(*lines: str) -> Group:
    return Group("\n\n".join(lines))


def video(*nodes: str) -> Group:
    return Group("Video", BLUE, nodes)


def style(*nodes: str, title: str = "Style") -> Group:
    return Group(title, GREEN, nodes)


def model(*nodes: str, title: str = "Model") -> Group:
    return Group(title, STEEL, nodes)


def stylise(*nodes: str, title: str = "Stylise") -> Group:
    return Group(title, GOLD, nodes)


def result(*nodes: str, title: str = "Result") -> Group:
    return Group(title, PURPLE, nodes)


def memory(*nodes: str, title: str = "Memory") -> Group:
    return Group(title, GREY, nodes)


START = (
    "Press Run: the example and the painting come with the pack. Then choose your own video (or drop one on its node), and "
    "connect a Load Image to images of Style Encoder, with painting on none."
)
MINI = "veo-mini comes with the pack and works offline, without a GPU too. It reads pictures, not words."
RESUME = "An interrupted run goes on where it stopped: press Run again."
BACK = "The saved MP4 holds this workflow: drop it on the canvas to get it back."
WORDS = "Words: lines may begin with @scene 2, @48 (a frame) or @2.5s; (words:1.3) weigh more."

# Columns from the left, each a list of groups from above.
LAYOUTS = {
    "stylize_video": [
        [video("1")], [style("3"), note(START, MINI, RESUME)], [model("4"), stylise("5")], [result("6", "7"), note(BACK)],
    ],
    "before_and_after": [
        [video("1")], [style("3"), note(START, RESUME)], [model("4"), stylise("5")],
        [result("6", title="Decode"), note("split sweeps a line over the picture, the source left of it; side_by_side and "
         "stacked "
         "show both whole.")],
        [result("7", "8", title="Compare")],
    ],
    "two_styles_over_scenes": [
        [video("1")],
        [Group("Scenes", BLUE, ("2",)), note("The sample has four scenes; the third returns to the first. Style Blend "
         "takes the share of "
         "the second style in each scene in order; later scenes take the last number.", RESUME)],
        [style("4", title="First style")], [style("6", title="Second style")],
        [style("7", title="Blend"), model("8"), stylise("9")], [result("10", "11")],
    ],
    "own_checkpoint_sd15": [
        [video("1")], [style("3"), note(WORDS, RESUME)],
        [model("4"), stylise("5")],
        [result("6", "7"), note("Choose your SD 1.5 checkpoint (safetensors) in Load Model. preset says how the picture "
         "enters: faithful "
         "keeps every edge, strong repaints; denoise how much is redrawn.")],
    ],
    "own_checkpoint_sdxl": [
        [video("1")], [style("3"), note(WORDS, RESUME)],
        [model("4"), stylise("5")],
        [result("6", "7"), note("Choose your SDXL checkpoint in Load Model; the refiner is not one. A Memory Pool between "
         "model and "
         "denoiser shows what it will take.")],
    ],
    "comfyui_model_sd": [
        [video("1")], [style("3"), note(WORDS, RESUME)],
        [model("4", "5"), note("A MODEL of ComfyUI's own loaders. LoRA loaders and other packs' patches go between the two.")],
        [stylise("6")], [result("7", "8")],
    ],
    "comfyui_model_wan": [
        [video("1"), note("Wan was trained at 16 frames a second, on 4n + 1 frames.")], [style("3")],
        [model("4", "5", "6", "7"), note("Wan 2.1 or 2.2, text to video. Its own attention over time stays; windows meet "
         "in their "
         "overlap.")],
        [stylise("8"), note(RESUME)], [result("9", "10")],
    ],
    "lora_hot_swap": [
        [video("1")],
        [style("2", title="Words"), model("3"), note("The checkpoint is loaded once. A LoRA lies beside the weights and "
         "is never merged, "
         "so that both runs share them. kohya, diffusers, PEFT and LyCORIS files will do.")],
        [model("4", title="First LoRA"), model("8", title="Second LoRA")],
        [stylise("5", title="Stylise with the first"), stylise("9", title="Stylise with the second")],
        [result("6", title="Decode"), result("10", title="Decode")],
        [result("7", title="First result"), result("11", title="Second result")],
    ],
    "style_by_text": [
        [video("1")],
        [style("2", title="Words"), model("3"), note("The first line holds for the whole clip; @scene 2 adds words in the "
         "second scene, "
         "@48 at frame 48, @2.5s at 2.5 seconds. Between key frames the words change gradually.",
         "It takes a model that reads words: SD 1.5 or SDXL.")],
        [stylise("4"), note("Lower denoise keeps more of the source.", RESUME)], [result("5", "6")],
    ],
    "low_memory": [
        [video("1")], [style("3"), note("Memory Pool shows the plan before the run. lean encodes and decodes one "
         "frame at a time; the result is the same. Too small a budget is refused with the smallest that works.")],
        [model("4"), memory("5")], [stylise("6"), note(RESUME)], [result("7", "9")], [memory("8", title="Planned and measured")],
    ],
    "long_film": [
        [video("1")], [style("3"), note("Put the full path of your film into path: it is neither copied nor loaded. Memory "
         "does not grow with length; latents rest on disk.")],
        [model("4"), memory("5")], [stylise("6"), note("After a crash, or an interruption, press Run again: it goes on at the "
         "window where it stopped.")],
        [result("7", "8"), note("Encoded once, as H.265, in pieces that a crash does not cost; Save Video copies it.")],
    ],
    "ip_adapter": [
        [video("1")], [style("3"), note(RESUME)],
        [model("4", "5"), note("Put your IP-Adapter (safetensors) into models/ipadapter, and the image encoder it was made "
         "with into models/clip_vision. blocks = style leaves layout to the source.")],
        [stylise("6")], [result("7", "8")],
    ],
    "core_nodes": [
        [Group("From core", BLUE, ("1", "2")), note("A VIDEO of core, or of any pack, becomes a clip without being loaded.")],
        [style("3", "4"), model("5")], [stylise("6")],
        [result("7", title="Decode"), result("8", title="To core: a video")],
        [result("9", "10", "11", title="To core: frames"),
         note("The result is a VIDEO, and frames of it an IMAGE batch, for any node.")],
        [Group("And back", BLUE, ("12", "13"))],
    ],
}  # fmt: skip

LAY_OUT = """([columns, room, wider, gap, title, width]) => {
  const graph = app.graph;
  graph._groups.length = 0;
  let x = 0;
  for (const column of columns) {
    let y = 0, widest = 0;
    for (const group of column) {
      if (!group.nodes.length) {
        const note = LiteGraph.createNode("Note");
        graph.add(note);
        note.widgets[0].value = group.title;
        note.color = "#432"; note.bgcolor = "#653";
        note.pos = [x, y + 30];
        const lines = group.title.split("\\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / 46)), 0);
        note.size = [width + 2 * gap, 50 + 17 * lines];
        y += note.size[1] + 30 + gap;
        continue;
      }
      const nodes = group.nodes.map((id) => graph.getNodeById(Number(id)));
      const inner = width + Math.max(0, ...nodes.map((n) => wider[n.type] ?? 0));
      let top = y + title;
      for (const node of nodes) {
        node.pos = [x + gap, top + 30];
        node.size = [inner, node.computeSize()[1] + (room[node.type] ?? 0)];
        const seeded = node.widgets?.find((w) => w.name === "control_after_generate");
        if (seeded) seeded.value = "fixed";
        top += node.size[1] + 30 + gap / 2;
      }
      const made = new LiteGraph.LGraphGroup(group.title);
      made.pos = [x, y]; made.size = [inner + 2 * gap, top - y]; made.color = group.colour;
      graph.add(made);
      y = top + gap;
      widest = Math.max(widest, inner + 2 * gap);
    }
    x += widest + gap;
  }
  graph.setDirtyCanvas(true, true);
}"""


def lay_out(editor: Editor, name: str) -> None:
    """Writes TITLE.json."""
    columns = [[vars(g) for g in column] for column in LAYOUTS[name]]
    api = json.loads((HERE / "api" / f"{name}.json").read_text())
    editor.page.evaluate("async ([api, name]) => { await app.loadApiJson(api, name); }", [api, name])
    editor.page.wait_for_timeout(2000)
    editor.page.evaluate(LAY_OUT, [columns, ROOM, WIDER, GAP, TITLE, WIDTH])
    made = editor.workflow()
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for node in made["nodes"]:
        ours = node["type"].startswith("VeoStyle")
        node["properties"] = {"Node name for S&R": node["type"]} | (
            {"cnr_id": "comfyui-veostyle", "ver": version} if ours else {"cnr_id": "comfy-core", "ver": "0.3.64"}
        )
    made["extra"] = {}
    name_models(made)
    (HERE / f"{TITLES[name]}.json").write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")


def name_models(made: dict) -> None:
    """Writes into a workflow, and into its nodes, where the models come from that they name."""
    found = {}
    for node in made["nodes"]:
        named = [v for v in node.get("widgets_values") or [] if isinstance(v, str) and v in MODELS]
        models = [
            {"name": n, "url": HUB.format(MODELS[n][1], MODELS[n][2] + n), "directory": MODELS[n][0]} for n in named
        ]
        if models:
            node["properties"]["models"] = models
        found |= {m["name"]: m for m in models}
    if found:
        made["models"] = list(found.values())


def thumbnail(editor: Editor, url: str, name: str) -> None:
    """Runs TITLE.json and writes TITLE.jpg: source and result under a split; where a model is missing, the graph."""
    api = json.loads((HERE / "api" / f"{name}.json").read_text())
    if any(str(v).endswith(".safetensors") for n in api.values() for v in n["inputs"].values()):
        editor.drop(HERE / f"{TITLES[name]}.json")
        picture_of_graph(editor).resize((480, 270)).save(HERE / f"{TITLES[name]}.jpg", quality=88)
        return
    files = finished(editor, name)
    shown = [_frame(_fetched(editor, url, f)) for f in files]
    if not any(n["class_type"] == "VeoStyleCompare" for n in api.values()):
        source = next(n["inputs"]["file"] for n in api.values() if "file" in n["inputs"])
        before = _frame(
            (ROOT / "examples" / f"{source.removeprefix('example: ').removesuffix('.mp4')}.mp4").read_bytes()
        ).resize(shown[0].size)
        shown[0].paste(before.crop((0, 0, before.width // 2, before.height)))
    shown[0].resize((480, round(480 * shown[0].height / shown[0].width))).save(HERE / f"{TITLES[name]}.jpg", quality=85)


def finished(editor: Editor, name: str) -> list[dict]:
    """Drops TITLE.json and runs it; the videos that it saved."""
    editor.drop(HERE / f"{TITLES[name]}.json")
    return saved(editor, *editor.run(1200))


def saved(editor: Editor, event: str, detail: dict) -> list[dict]:
    """The videos that a run saved."""
    if event != "execution_success":
        raise SystemExit(f"{detail.get('node_type')}: {detail.get('exception_message', event)}")
    history = editor.page.evaluate(
        "async id => (await (await fetch('/history/' + id)).json())[id]", detail["prompt_id"]
    )
    files = [f for out in history["outputs"].values() for f in out.get("images", []) if f["type"] == "output"]
    return [f for f in files if Path(f["filename"]).suffix in (".mp4", ".webp")]


def picture_of_graph(editor: Editor) -> Image.Image:
    """The graph alone, 16:9."""
    page = editor.page
    page.add_style_tag(content=".p-toast, [data-testid*=minimap], .minimap-main-container { display: none !important }")
    page.evaluate(
        """() => {
          document.querySelectorAll("[role=alert], [data-testid*=error]").forEach((e) => e.style.setProperty("display", "none"));
          for (const node of app.graph.nodes) node.has_errors = false;
          const boxes = [...app.graph._groups, ...app.graph.nodes].map(
            (g) => [g.pos[0], g.pos[1] - 30, g.pos[0] + g.size[0], g.pos[1] + g.size[1]]);
          const left = Math.min(...boxes.map((b) => b[0])), top = Math.min(...boxes.map((b) => b[1]));
          const right = Math.max(...boxes.map((b) => b[2])), bottom = Math.max(...boxes.map((b) => b[3]));
          const scale = Math.min(1280 / (right - left), 720 / (bottom - top)), ds = app.canvas.ds;
          const canvas = app.canvas.canvas.getBoundingClientRect();
          ds.scale = scale;
          ds.offset = [(210 - canvas.left + (1280 - scale * (right - left)) / 2) / scale - left,
                       (150 - canvas.top + (720 - scale * (bottom - top)) / 2) / scale - top];
          app.canvas.low_quality_zoom_threshold = app.canvas.min_font_size_for_lod = 0;
          app.canvas.draw(true, true);
        }"""
    )
    page.wait_for_timeout(1500)
    shot = page.screenshot(clip={"x": 210, "y": 150, "width": 1280, "height": 720})
    return Image.open(io.BytesIO(shot)).convert("RGB")


def _fetched(editor: Editor, url: str, file: dict) -> bytes:
    answer = editor.page.request.get(f"{url}/view", params=file)
    return answer.body()


def _frame(video: bytes, share: float = 0.33) -> Image.Image:
    """A frame a third into a video."""
    with av.open(io.BytesIO(video)) as container:
        frames = container.streams.video[0].frames
        for index, frame in enumerate(container.decode(video=0)):
            if index >= share * frames:
                return frame.to_image()
    return frame.to_image()


def pictures_of_nodes(editor: Editor) -> None:
    """Writes a picture of every node as it comes out of the menu."""
    page = editor.page
    for node_id in page.evaluate("Object.keys(LiteGraph.registered_node_types).filter(t => t.startsWith('VeoStyle'))"):
        box = page.evaluate(
            """async (type) => {
              app.graph.clear();
              const node = LiteGraph.createNode(type);
              app.graph.add(node);
              const file = node.widgets?.find((w) => w.name === "file");
              if (file) { file.value = "example: city"; file.callback?.("example: city"); }
              node.pos = [60, 110];
              node.size = [340, node.computeSize()[1]];
              app.canvas.ds.scale = 1; app.canvas.ds.offset = [100, 40];
              app.canvas.draw(true, true);
              return [node.pos[0] + 100 - 12, node.pos[1] + 40 - 42, 340 + 24, node.size[1] + 58];
            }""",
            node_id,
        )
        page.wait_for_timeout(5000 if node_id == "VeoStyleLoadVideo" else 700)
        shot = page.screenshot(clip=dict(zip(("x", "y", "width", "height"), box, strict=True)))
        Image.open(io.BytesIO(shot)).convert("RGB").save(IMAGES / f"{node_id}.jpg", quality=88)


def pictures_of_readme(editor: Editor, url: str) -> None:
    """The canvas after a run, and a moving picture of source and result."""
    finished(editor, "stylize_video")
    editor.page.screenshot(path=IMAGES / "canvas.jpg", quality=82, type="jpeg")
    editor.drop(HERE / f"{TITLES['before_and_after']}.json")
    editor.page.evaluate(
        """() => {
          const values = { width: 384, every_nth: 2, duration: 4, format: "webp" };
          for (const node of app.graph.nodes) for (const w of node.widgets ?? []) if (w.name in values) w.value = values[w.name];
        }"""
    )
    files = saved(editor, *editor.run(1200))
    (IMAGES / "before_and_after.webp").write_bytes(_fetched(editor, url, files[0]))


def main() -> None:
    url, task, *names = sys.argv[1:]
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in names or ([""] if task in ("nodes", "readme") else LAYOUTS):
        with opened(url, (1700, 1000)) as editor:
            if task == "layout":
                lay_out(editor, name)
            elif task == "thumbnails":
                thumbnail(editor, url, name)
            elif task == "nodes":
                pictures_of_nodes(editor)
            else:
                pictures_of_readme(editor, url)
        print(task, name)


if __name__ == "__main__":
    main()
