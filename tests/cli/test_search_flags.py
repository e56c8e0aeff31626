"""--search and --expand, in `search` and in `ask`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.fixture
def pages(cli: Cli, docs: Path) -> Path:
    """A page of one chunk that a question suits best, and one of several that follow one another."""
    for path in docs.iterdir():
        path.unlink()
    (docs / "short.md").write_text("lead lead parrot parrot.\n")
    (docs / "long.md").write_text(
        "".join(f"the parrot keeps number {i} at home with the team {i}.\n\n" for i in range(6))
    )
    assert cli("precompute", "docs", "--chunk-tokens", "24").code == 0
    return docs


def planned(cli: Cli, *arguments: str) -> dict[str, Any]:
    result = cli("ask", "who leads the parrot?", "--dry-run", "--json", "-k", "9", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_the_document_with_the_most_exact_tokens_comes_first(cli: Cli, pages: Path) -> None:
    best = cli("search", "who leads the parrot?", "-k", "9", "--json").records[0]
    found = planned(cli)
    assert best["source"].endswith("short.md")
    assert found["chunks"][0]["source"].endswith("long.md")
    assert best["id"] in {c["id"] for c in found["chunks"]}


def test_neighbours_come_with_a_hit(cli: Cli, pages: Path) -> None:
    one = cli("search", "number 3", "-k", "1", "--json").records
    three = cli("search", "number 3", "-k", "1", "--expand", "1", "--json").records
    assert [r["beside"] for r in three] == [False, True, True]
    assert three[0] == one[0]
    assert sorted(r["index"] for r in three) == [one[0]["index"] + i for i in (-1, 0, 1)]
    assert len(cli("search", "number 3", "-k", "1", "--expand", "1").out.splitlines()) == 4


def test_unknown_ways_to_search_are_refused(cli: Cli, pages: Path) -> None:
    for command in ("search", "ask"):
        wrong = cli(command, "parrot", "--search", "feeling")
        assert (wrong.code, "auto, words, meaning, both" in wrong.err) == (2, True)
    missing = cli("search", "parrot", "--search", "meaning", "--embeddings", "nowhere/at-all/here")
    assert missing.code == 3


def test_without_weights_words_are_searched_which_is_said_once(
    cli: Cli, pages: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cacheblend_cli.corpus.embedding.find_spec", lambda name: None)
    (tmp_path / "batch.jsonl").write_text('{"question": "parrot?"}\n' * 2)
    words = cli("search", "parrot", "-q")
    assert cli("search", "parrot", "-q", "--search", "auto").err == words.err
    result = cli("search", "parrot", "--search", "both")
    assert [line.split()[0] for line in result.out.splitlines()[1:]] == [name[:12] for name in words.out.split()]
    assert result.err.count("words are searched") == 1
    batch = cli("ask", "--batch", "batch.jsonl", "--search", "both", "--max-tokens", "1")
    assert (batch.code, batch.err.count("words are searched")) == (0, 1)


def test_search_by_words_computes_no_vectors(cli: Cli, pages: Path, tmp_path: Path) -> None:
    assert cli("search", "parrot", "-q").code == 0
    with sqlite3.connect(tmp_path / "store" / "search.sqlite3") as db:
        assert db.execute("SELECT count(*) FROM vectors").fetchone() == (0,)


def test_a_store_that_was_put_back_is_searched_anew(cli: Cli, docs: Path, tmp_path: Path) -> None:
    """Its number of changes is the same as before, so the number alone cannot show that it is another store."""
    data, note = tmp_path / "store" / "data.mdb", docs / "note.md"
    cli("precompute", "docs")
    kept = data.read_bytes()
    note.write_text("zeppelins fly\n")
    cli("precompute", "docs")
    assert cli("search", "zeppelins", "--search", "words").code == 0
    data.write_bytes(kept)
    note.write_text("submarines dive\n")
    cli("precompute", "docs")
    assert cli("search", "zeppelins", "--search", "words").code == 3
    assert cli("search", "submarines", "--search", "words").code == 0
