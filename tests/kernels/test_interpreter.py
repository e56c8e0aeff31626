"""Runs `numeric/` in Triton's interpreter, one process a file and two at a time, whether or not there is a GPU too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

NUMERIC = Path(__file__).parent / "numeric"
ROOT = Path(__file__).parents[2]
FILES = sorted((path.name for path in NUMERIC.glob("test_*.py")), key=lambda name: name != "test_prefill_attention.py")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NO_XFORMERS = pytest.mark.skipif(find_spec("xformers") is None, reason="xformers is not installed")
CASES = [pytest.param(name, marks=NO_XFORMERS if "xformers" in name else ()) for name in FILES]

Result = subprocess.CompletedProcess[str]


def run(name: str, marks: str) -> Result:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "-W", "ignore"]
    return subprocess.run(
        [*command, str(NUMERIC / name)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580 if marks == "not torture" else 3000,
    )


def check(result: Result) -> None:
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-2000:]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """The files that were asked for, started; the longest first."""
    asked = {
        item.callspec.params["name"] for item in request.session.items if "runs" in getattr(item, "fixturenames", ())
    }
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name, "not torture") for name in FILES if name in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.parametrize("name", CASES)
def test_in_interpreter(name: str, runs: dict[str, Future[Result]]) -> None:
    check(runs[name].result())


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.parametrize("name", [n for n in FILES if "torture" in (NUMERIC / n).read_text()])
def test_torture_in_interpreter(name: str) -> None:
    check(run(name, "torture"))
