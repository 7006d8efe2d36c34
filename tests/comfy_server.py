"""A real ComfyUI with folders of its own, the pack under a strange name, and tiny models under the names of real ones."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from safetensors.torch import save_file

from . import tiny
from .conftest import EXAMPLES, ROOT, make_pictures, make_video
from .test_ip_adapter import hf_state, ip_adapter_file, vision_model
from .test_lora import kohya_file

CORE_LOADERS = ("CheckpointLoaderSimple", "UNETLoader", "VAELoader", "CLIPLoader")


class Server:
    """A ComfyUI of its own folders, with the pack cloned under a strange name."""

    def __init__(self, core: Path, base: Path):
        self.base = base
        packs = base / "packs"
        packs.mkdir()
        (packs / "an-odd-name_2").symlink_to(ROOT)
        (packs / "tiny_loaders").symlink_to(ROOT / "tests" / "comfy_pack")
        for name in (
            "input",
            "output",
            "temp",
            "user",
            "models",
            "models/checkpoints",
            "models/loras",
            "models/clip_vision",
            "models/ipadapter",
        ):
            (base / name).mkdir()
        made = tiny.parts()
        for name in ("tiny", "v1-5-pruned-emaonly-fp16"):
            tiny.save_checkpoint(made, base / f"models/checkpoints/{name}.safetensors")
        tiny.save_checkpoint(tiny.parts("sdxl"), base / "models/checkpoints/sd_xl_base_1.0.safetensors")
        for seed, name in enumerate(("tiny", "style_a", "style_b")):
            kohya_file(base / f"models/loras/{name}.safetensors", made.unet, seed)
        save_file(hf_state(vision_model()), base / "models/clip_vision/clip_vision_h.safetensors")
        ip_adapter_file(base / "models/ipadapter/ip-adapter_sd15.safetensors", made.unet)
        for file in EXAMPLES.iterdir():
            shutil.copy(file, base / "input")
        four_scenes(base / "input" / "small.mp4")
        models = {kind: base / "models" / kind for kind in ("checkpoints", "loras", "clip_vision", "ipadapter")} | {
            "custom_nodes": packs
        }
        (base / "extra.yaml").write_text("veo:\n" + "".join(f"  {k}: {v}\n" for k, v in models.items()))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        python = next(p for p in (core / ".venv/bin/python", core / ".venv/Scripts/python.exe") if p.exists())
        options = [f"--{k}-directory={base / k}" for k in ("input", "output", "temp", "user")]
        options += ["--cpu", "--port", str(self.port), "--disable-auto-launch"]
        options += ["--extra-model-paths-config", base / "extra.yaml"]
        self.log = (base / "log").open("w")
        # Whatever is written outside ComfyUI's folders is found here.
        self.home = base / "home"
        self.home.mkdir()
        outside = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"), "TMPDIR": str(self.home)}
        self.process = subprocess.Popen(
            [python, "main.py", *options],
            cwd=core,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ | outside,
        )
        try:
            self._wait(lambda: self.get("/system_stats"), 180)
        except BaseException:
            self.close()
            raise

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def _wait(self, done, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.base / "log").read_text()[-3000:]
            try:
                if result := done():
                    return result
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.3)
        raise TimeoutError((self.base / "log").read_text()[-3000:])

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def post(self, path, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def queue(self, graph):
        return self.post("/prompt", {"prompt": graph})["prompt_id"]

    def finished(self, prompt, seconds=400):
        def entry():
            found = self.get(f"/history/{prompt}").get(prompt)
            return found if found and found.get("status", {}).get("status_str") else None

        return self._wait(entry, seconds)


def python_of(core: Path) -> Path:
    """The Python of a ComfyUI's own environment."""
    return next(p for p in (core / ".venv/bin/python", core / ".venv/Scripts/python.exe") if p.exists())


def small(api: dict, base: Path) -> dict:
    """A workflow of the queue with few small frames, few steps, and tiny models in place of those of core's loaders."""
    nodes = json.loads(json.dumps(api))
    for node in nodes.values():
        if node["class_type"] in CORE_LOADERS:
            node["class_type"] = f"Tiny{node['class_type']}"
        node["inputs"] |= SMALL.get(node["class_type"], {})
        if node["inputs"].get("steps"):
            node["inputs"] |= {"steps": 2, "window": 9}
    return nodes


SMALL = {
    "VeoStyleLoadVideo": {
        "file": "small.mp4",
        "width": 0,
        "height": 0,
        "frame_cap": 0,
        "force_rate": 0.0,
        "duration": 0.0,
    },
    "LoadVideo": {"file": "small.mp4"},
    "VeoStyleFrames": {"first": 4, "count": 2},
}
SIZE, FRAMES = (96, 64), 20


def four_scenes(path: Path) -> None:
    """Four scenes of five frames, each a picture that moves."""
    shots = [make_pictures(FRAMES, SIZE, seed) for seed in range(4)]
    make_video(path, FRAMES, size=SIZE, picture=lambda i, w, h: shots[i // 5](i, w, h))
