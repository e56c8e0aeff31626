"""Commands of this process in a directory with documents that are stored: what is asked of an engine beside them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cacheblend_cli.cli.main import run

PAGES = ("# Billing\n\nthe lead of billing is Mara and she works in Bergen\n", "Jonas keeps a parrot at home\n")


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.splitlines()[-1]


Cli = Callable[..., Said]


def cli_in(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands whose settings are those of the first server of `start`, after a precompute of PAGES."""
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

    def call(*arguments: str, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        code = run(list(arguments))
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    assert call("precompute", "docs", "-q", "--context", "sink").code == 0
    return call
