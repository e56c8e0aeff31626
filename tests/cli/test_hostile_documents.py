"""`precompute` of a folder with hostile files: each is named with its reason, nothing of it is stored, and the others
are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import files
import hostile
import pytest

from cacheblend_cli.corpus.converters import process

Cli = Callable[..., Any]


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    limits = partial(process.ConversionLimits, seconds=seconds, seconds_per_mib=0)
    monkeypatch.setattr(process, "ConversionLimits", limits)


def test_a_hostile_file_is_named_and_nothing_of_it_is_stored(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 0.5)
    files.write(docs / "slow.html", "<div>" * 50_000 + "harbor")
    files.write(docs / "locked.pdf", hostile.PDFS["locked"]())
    done = cli("precompute", "docs", "-v")
    assert done.code == 0
    assert "slow.html: takes more than" in done.err
    assert "locked.pdf: a PDF with a password" in done.err
    sources = {record["source"] for record in cli("chunks", "ls", "--json").records}
    assert sources
    assert not any("slow" in source or "locked" in source for source in sources)
