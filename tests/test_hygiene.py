"""What must not be in the tree: code execution from data, and folders that shadow other packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [f for d in ("cacheblend_cli", "store", "kernels", "tools", "benchmarks") for f in (ROOT / d).rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_code_from_data(path: Path) -> None:
    """No pickle, torch.load, eval, exec or trust_remote_code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            assert not {n.split(".")[0] for n in names} & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "numpy.load", "np.load")
            assert not any(k.arg in ("trust_remote_code", "allow_pickle") for k in node.keywords)


def test_store_and_kernels_folders_are_not_importable(tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('store', 'kernels') if u.find_spec(n)])"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
