"""Runs `numeric/` in Triton's interpreter, in a process of its own, whether or not there is a GPU too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

NUMERIC = Path(__file__).parent / "numeric"
ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in NUMERIC.glob("test_*.py"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run(marks: str, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "-W", "ignore"]
    return subprocess.run(
        [*command, *(str(NUMERIC / name) for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580 if marks == "not torture" else 3000,
    )


def check(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_in_interpreter() -> None:
    check(run("not torture", *FILES))


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.parametrize("name", [n for n in FILES if "torture" in (NUMERIC / n).read_text()])
def test_torture_in_interpreter(name: str) -> None:
    check(run("torture", name))
