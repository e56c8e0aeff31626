"""The wheel holds all the tool needs: installed into an environment of its own, beside the libraries, it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
LEFT = ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__", "tests", "results", ".*_cache", "shared")


def run(*command: str, cwd: Path, **variables: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_answers(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    copytree(ROOT, tmp_path / "source", ignore=LEFT, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(tmp_path / "source"))
    run(*pip, *build, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    own = tmp_path / "own"
    run(sys.executable, "-m", "venv", "--without-pip", str(own), cwd=tmp_path)
    run(*pip, "--python", str(own), "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    [packages] = own.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind what is installed here
    tool = str(own / "bin" / "cacheblend")
    where = run(
        str(own / "bin" / "python"), "-c", "import cacheblend_cli; print(cacheblend_cli.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(own))
    (tmp_path / "a.md").write_text("# Billing\n\nMara leads billing.\n")
    store = str(tmp_path / "store")
    run(tool, "precompute", "a.md", "--store", store, "--model", "handbook", cwd=tmp_path)
    asked = ("ask", "Who leads billing?", "--store", store, "--model", "handbook", "--max-tokens", "4", "--json")
    assert '"status": "exact"' in run(tool, *asked, cwd=tmp_path)
    assert (own / "share" / "man" / "man1" / "cacheblend.1").is_file()
