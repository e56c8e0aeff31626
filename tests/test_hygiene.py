"""What must not be in the tree: code execution from data, and folders that shadow other packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    f
    for d in ("cacheblend_cli", "documents", "store", "kernels", "tools", "benchmarks", "study")
    for f in (ROOT / d).rglob("*.py")
]


def test_no_code_from_data() -> None:
    """Covers what the linter's rules (eval, exec, pickle, torch.load, numpy.load) miss."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if "trust_remote_code" not in text and "allow_pickle" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                said = [k.value for k in node.keywords if k.arg in ("trust_remote_code", "allow_pickle")]
                assert all(isinstance(v, ast.Constant) and v.value is False for v in said), path


def test_the_wheel_has_every_package() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = [(name, ROOT / place) for name, place in tool["package-dir"].items()]
    modules = [(name, path.relative_to(folder)) for name, folder in folders for path in folder.rglob("*.py")]
    assert {".".join((name, *path.parent.parts)) for name, path in modules} == set(tool["packages"])


def test_folders_of_packages_are_not_importable(tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('documents', 'store', 'kernels') if u.find_spec(n)])"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_engine_is_the_only_door() -> None:
    """Covers what the import contracts miss: attributes that lead into the engine's modules."""
    for room in ("cli", "server", "evaluation"):
        paths = list((ROOT / "cacheblend_cli" / room).rglob("*.py"))
        assert paths
        for path in paths:
            assert ".runtime" not in path.read_text(encoding="utf-8"), path
