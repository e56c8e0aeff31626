"""Runs `numeric/` in Triton's interpreter, one process a file, where there is no GPU to run it on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUMERIC = Path(__file__).parent / "numeric"
ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in NUMERIC.glob("test_*.py"))


def run(name: str, marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "-W", "ignore"]
    result = subprocess.run(
        [*command, str(NUMERIC / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580 if marks == "not torture" else 3000,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-2000:]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
@pytest.mark.parametrize("name", FILES)
def test_in_interpreter(name: str) -> None:
    run(name, "not torture")


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
@pytest.mark.parametrize("name", [n for n in FILES if "torture" in (NUMERIC / n).read_text()])
def test_torture_in_interpreter(name: str) -> None:
    run(name, "torture")
