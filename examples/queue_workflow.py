"""Queues an API-format workflow on a running ComfyUI, follows it, and fetches what it saved; for one clip or a folder.

    python queue_workflow.py ../workflows/api/stylize_video.json --set 5.strength=0.8 --output results
    python queue_workflow.py ../workflows/api/stylize_video.json --clips my_clips --image style.jpg --retries 2

Needs aiohttp, which ComfyUI's own environment has. Exit code 0 when every clip came out, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import uuid
from pathlib import Path

import aiohttp

VIDEOS = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp"}
LOADERS = {"VeoStyleLoadVideo": "file", "LoadVideo": "file"}


class Failed(Exception):
    """A workflow that did not finish; says which node and why."""


def with_inputs(workflow: dict, changes: dict[str, object]) -> dict:
    """A copy of a workflow with ``node.input`` set; the node by its number or its class."""
    changed = json.loads(json.dumps(workflow))
    for place, value in changes.items():
        node, _, name = place.rpartition(".")
        found = [key for key, entry in changed.items() if node in (key, entry["class_type"])]
        if not found:
            raise SystemExit(
                f"--set {place}: no node {node!r}; there are {', '.join(n['class_type'] for n in changed.values())}"
            )
        for key in found:
            changed[key]["inputs"][name] = value
    return changed


class Server:
    """A running ComfyUI.

    Args:
        address: host and port.
    """

    def __init__(self, address: str, session: aiohttp.ClientSession):
        self.url, self.session, self.client = f"http://{address}", session, uuid.uuid4().hex

    async def upload(self, file: Path) -> str:
        """Puts a file into ComfyUI's input folder; its name there."""
        form = aiohttp.FormData()
        form.add_field("image", file.read_bytes(), filename=file.name)
        async with self.session.post(f"{self.url}/upload/image", data=form) as answer:
            answer.raise_for_status()
            return (await answer.json())["name"]

    async def run(self, workflow: dict, told) -> dict:
        """Queues a workflow and waits for its end; its outputs. ``told(text)`` hears of progress."""
        async with self.session.ws_connect(f"{self.url}/ws?clientId={self.client}", max_msg_size=0) as socket:
            body = {"prompt": workflow, "client_id": self.client}
            async with self.session.post(f"{self.url}/prompt", json=body) as answer:
                reply = await answer.json()
                if answer.status != 200:
                    raise Failed(refusal(reply, workflow))
            await self._follow(socket, reply["prompt_id"], workflow, told)
        for _ in range(20):  # the history can be late
            async with self.session.get(f"{self.url}/history/{reply['prompt_id']}") as answer:
                if found := (await answer.json()).get(reply["prompt_id"]):
                    return found["outputs"]
            await asyncio.sleep(0.3)
        raise Failed("ComfyUI keeps no history of it")

    async def _follow(self, socket, prompt: str, workflow: dict, told) -> None:
        async for message in socket:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            kind, data = event["type"], event.get("data", {})
            if data.get("prompt_id", prompt) != prompt:
                continue
            if kind == "progress":
                name = workflow.get(str(data.get("node")), {}).get("class_type", "")
                told(f"{name} {data['value']}/{data['max']}")
            elif kind == "execution_error":
                raise Failed(f"{data['node_type']}: {data['exception_message'].strip()}")
            elif kind == "execution_interrupted":
                raise Failed("interrupted")
            elif kind == "executing" and data.get("node") is None:
                return
        raise Failed("the connection to ComfyUI broke")

    async def fetch(self, outputs: dict, folder: Path) -> list[Path]:
        """Downloads every file that the workflow saved."""
        files = []
        for entry in outputs.values():
            for item in (i for items in entry.values() if isinstance(items, list) for i in items):
                if not isinstance(item, dict) or item.get("type") != "output":
                    continue
                where = {k: item[k] for k in ("filename", "subfolder", "type")}
                async with self.session.get(f"{self.url}/view", params=where) as answer:
                    answer.raise_for_status()
                    folder.mkdir(parents=True, exist_ok=True)
                    part = folder / f".{item['filename']}.part"
                    part.write_bytes(await answer.read())
                    files.append(part.replace(folder / item["filename"]))
        return files


def refusal(reply: dict, workflow: dict) -> str:
    """Why ComfyUI did not take a workflow, node by node."""
    lines = [
        f"{workflow[node]['class_type']}: {error.get('details') or error['message']}"
        for node, entry in reply.get("node_errors", {}).items()
        for error in entry["errors"]
    ]
    return "; ".join(lines) or reply.get("error", {}).get("message", "refused")


async def attempt(server: Server, workflow: dict, folder: Path, retries: int, name: str) -> list[Path]:
    """Runs a workflow, again when it fails; what it saved."""
    shown = [0.0]

    def told(text: str) -> None:
        if time.monotonic() - shown[0] > 0.5:
            shown[0] = time.monotonic()
            print(f"\r{name}: {text:<60}", end="", file=sys.stderr, flush=True)

    for left in range(retries, -1, -1):
        try:
            return await server.fetch(await server.run(workflow, told), folder)
        except (Failed, aiohttp.ClientError) as e:
            print(f"\r{name}: {e}{'; again' if left else ''}", file=sys.stderr)
            if not left:
                raise
            await asyncio.sleep(1)
    return []


def with_picture(workflow: dict) -> dict:
    """The graph with a loader of pictures before its style encoders, where it has none but takes a painting of the pack's."""
    if any(node["class_type"] == "LoadImage" for node in workflow.values()):
        return workflow
    loader = {"style picture": {"class_type": "LoadImage", "inputs": {"image": ""}}}
    encoders = {
        key: node | {"inputs": node["inputs"] | {"images": ["style picture", 0], "painting": "none"}}
        for key, node in workflow.items()
        if node["class_type"] == "VeoStyleEncoder"
    }
    return workflow | encoders | loader


async def main(a: argparse.Namespace) -> int:
    workflow = json.loads(a.workflow.read_text())
    changes = {}
    for text in a.set:
        place, _, value = text.partition("=")
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        changes[place] = value
    clips = sorted(p for p in a.clips.iterdir() if p.suffix.lower() in VIDEOS) if a.clips else [None]
    if not clips:
        raise SystemExit(f"--clips {a.clips}: no videos there")
    done, failed = [], []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        server = Server(a.server, session)
        if a.image:
            workflow = with_picture(workflow)
            changes["LoadImage.image"] = await server.upload(a.image)
        for clip in clips:
            name, own = (clip.name if clip else a.workflow.stem), dict(changes)
            begin = time.monotonic()
            try:
                if clip:
                    uploaded = await server.upload(clip)
                    own |= {f"{n['class_type']}.{LOADERS[n['class_type']]}": uploaded
                            for n in workflow.values() if n["class_type"] in LOADERS}  # fmt: skip
                files = await attempt(server, with_inputs(workflow, own), a.output, a.retries, name)
                done.append((name, time.monotonic() - begin, files))
            except (Failed, aiohttp.ClientError) as e:
                failed.append((name, str(e)))
    print(file=sys.stderr)
    for name, seconds, files in done:
        print(f"{name}: {seconds:.1f} s, {', '.join(map(str, files)) or 'nothing saved'}")
    for name, reason in failed:
        print(f"{name}: failed, {reason}")
    print(f"{len(done)} of {len(clips)} done")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workflow", type=Path, help="API-format JSON")
    parser.add_argument("--server", default="127.0.0.1:8188")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="node by number or class"
    )
    parser.add_argument("--clips", type=Path, help="folder of videos, one run each")
    parser.add_argument("--image", type=Path, help="style picture")
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--retries", type=int, default=1)
    sys.exit(asyncio.run(main(parser.parse_args())))
