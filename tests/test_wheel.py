"""The wheel holds all the tool needs: installed into an environment of its own, beside the libraries, it answers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "*.egg-info", "__pycache__", "tests", "results", ".*_cache", "shared"
)


def run(*command: str, cwd: Path, **variables: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_answers(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copytree(ROOT, tmp_path / "source", ignore=LEFT, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(tmp_path / "source"))
    compiler, settings = shutil.which("cc"), {}
    if compiler is not None:  # a fifth of the time without optimisation, which setup.py asks for
        (tmp_path / "cc").write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        (tmp_path / "cc").chmod(0o755)
        settings["CC"] = str(tmp_path / "cc")
    run(*pip, *build, cwd=tmp_path, **settings)
    [wheel] = tmp_path.glob("*.whl")
    own = tmp_path / "own"
    run(sys.executable, "-m", "venv", "--without-pip", str(own), cwd=tmp_path)
    run(*pip, "--python", str(own), "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    [packages] = own.glob("lib/python*/site-packages")
    for name in ("_cpu", "_cpu_avx2"):
        if importlib.util.find_spec(f"cacheblend_kernels.{name}") is not None:  # it could be compiled here
            assert list(packages.glob(f"cacheblend_kernels/{name}.*"))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind what is installed here
    tool = str(own / "bin" / "cacheblend")
    where = run(
        str(own / "bin" / "python"), "-c", "import cacheblend_cli; print(cacheblend_cli.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(own))
    (tmp_path / "a.md").write_text("# Billing\n\nMara leads billing.\n")
    assert run(tool, "--version", cwd=tmp_path).startswith("cacheblend ")
    both = (
        "from cacheblend_cli.cli.main import run; assert run(['precompute', 'a.md']) == 0; "
        "assert run(['ask', 'Who leads billing?', '--max-tokens', '4', '--json']) == 0"
    )  # in one process, which imports torch once
    settings = {"CACHEBLEND_STORE": str(tmp_path / "store"), "CACHEBLEND_MODEL": "handbook"}
    assert '"status": "exact"' in run(str(own / "bin" / "python"), "-c", both, cwd=tmp_path, **settings)
    assert (own / "share" / "man" / "man1" / "cacheblend.1").is_file()
