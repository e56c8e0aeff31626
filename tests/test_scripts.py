"""Names that benchmarks and tools import exist; the suite runs few of these scripts."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    str(p.relative_to(ROOT)) for folder in ("benchmarks", "study", "tools") for p in (ROOT / folder).rglob("*.py")
)
PACKAGES = (
    "cacheblend_cli",
    "cacheblend_documents",
    "cacheblend_store",
    "cacheblend_kernels",
    "cacheblend_ray",
    "cacheblend_vllm",
)


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith(PACKAGES)  # an optional dependency is not installed here
    return True


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_imports_is_there(script: str) -> None:
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
        for alias in node.names
        if not is_there(str(node.module), alias.name)
    ]
    assert not missing
