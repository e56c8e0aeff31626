"""Run commands in this process, in a directory with stored documents, next to a running engine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cacheblend_cli.cli.main import run

ROOT = Path(__file__).parents[2]
ASK = ("ask", "who leads billing? Jonas", "-v")
PAGES = ("# Billing\n\nthe lead of billing is Mara and she works in Bergen\n", "Jonas keeps a parrot at home\n")


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.splitlines()[-1]

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., CommandResult]


def process(*arguments: str, code: str = "sys.exit(run(sys.argv[1:]))") -> CommandResult:
    """Run a command in a separate process."""
    paths = [str(ROOT / part) for part in ("", "documents", "store", "kernels")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    program = f"import sys; from cacheblend_cli.cli.main import run; {code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=100
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command in this process."""

    def call(*arguments: str, stdin: str = "") -> CommandResult:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        code = run(list(arguments))
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return call


def cli_in(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Precompute PAGES and return a function that runs commands with the settings of the first server of `start`."""
    settings = {
        "MODEL": model,
        "STORE": folder / "store0",
        "SEARCH": "words",
        "MAX_TOKENS": 6,
        "THREADS": 1,
        "CHUNK_TOKENS": 40,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"CACHEBLEND_{name}", str(value))
    monkeypatch.chdir(folder)
    (folder / "docs").mkdir()
    for i, text in enumerate(PAGES):
        (folder / "docs" / f"{i}.md").write_text(text)

    call = in_process(monkeypatch, capsys)
    assert call("precompute", "docs", "-q", "--context", "sink").code == 0
    return call
