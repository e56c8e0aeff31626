"""`ask --confirm` on a pipe, on a terminal and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
WORDS = ["alpha", "where does Mara work?", "who"]


@pytest.fixture
def chunks(cli: Cli, docs: Path) -> str:
    return ",".join(reversed(cli("precompute", "docs", "--chunk-tokens", "40", "-q").out.split()))


def test_the_answer_of_a_pipe_is_the_full_one(cli: Cli, chunks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {}
    for words in WORDS:
        asked = ("ask", words, "--chunks", chunks, "--max-tokens", "12")
        confirmed = cli(*asked, "--mode", "reuse", "--confirm")
        codes[words] = confirmed.code
        assert confirmed.out == cli(*asked, "--mode", "full").out
        assert ("confirmed:" if confirmed.code == 0 else "changed:") in confirmed.err
        record = cli(*asked, "--mode", "reuse", "--confirm", "--json")
        assert record.code == confirmed.code
        found = record.records[0]
        assert found["answer"] + "\n" == confirmed.out
        assert found["confirm"]["confirmed"] == (record.code == 0)
        assert found["confirm"]["blended_answer"] + "\n" == cli(*asked, "--mode", "reuse").out
    assert 6 in codes.values()  # plain reuse is not always right, or this test shows nothing
    changed = next(words for words, code in codes.items() if code == 6)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    asked = ("ask", changed, "--chunks", chunks, "--max-tokens", "12")
    shown = cli(*asked, "--mode", "reuse", "--confirm")
    assert shown.code == 6
    draft, _, rest = shown.out.partition("\n")
    assert draft + "\n" == cli(*asked, "--mode", "reuse").out  # as it came
    full = cli(*asked, "--mode", "full").out
    assert full.endswith(rest.removeprefix("... "))
    assert shown.err
