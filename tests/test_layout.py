"""What holds for the repository as a whole: layers, imports, what users install, what is tracked."""

import ast
import re
import subprocess

import pytest

from .conftest import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

SOURCES = [p for d in ("nodes", "veo_core", "kernels") for p in (ROOT / d).rglob("*.py")]


def imports(path):
    """Absolute names that a file imports, relative ones resolved against the package."""
    package = ("comfyui_veostyle", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            yield base + (node.module or "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path):
    layer = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        assert not name.startswith(("nodes", "veo_core", "kernels")), "imports inside the pack are relative"
        if layer == "veo_core":
            assert not name.startswith(("comfy", "folder_paths")) or name.startswith("comfyui_veostyle.")
            assert not name.startswith("comfyui_veostyle.nodes")
        if layer == "kernels":
            assert not name.startswith("comfyui_veostyle.") or name.startswith("comfyui_veostyle.kernels")
        assert not name.startswith(("cv2", "pickle"))


def test_every_package_is_shipped():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("comfyui_veostyle", *p.parent.relative_to(ROOT).parts)) for p in SOURCES if p.name == "__init__.py"
    }
    assert found <= listed
    needs = project["project"]["dependencies"]
    assert "torch" in needs
    assert not any(re.match(r"(torch|numpy)\W", n) or "opencv" in n for n in needs)
    required = [x for x in (ROOT / "requirements.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert sorted(required) == sorted(n for n in needs if n != "torch")


def test_importing_the_pack_is_light():
    code = "import sys, comfyui_veostyle; print([m for m in ('torch', 'diffusers', 'av') if m in sys.modules])"
    from sys import executable

    done = subprocess.run([executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "[]"


def test_public_functions_have_docstrings():
    missing = []
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert not missing
