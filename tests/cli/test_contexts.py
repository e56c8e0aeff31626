"""Which context a command takes when a store has several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SMALL = ("--chunk-tokens", "40")
SHORT = ("--max-tokens", "4", "--json")


@pytest.fixture
def ids(cli: Cli, docs: Path) -> dict[str, set[str]]:
    """The ids of each context's chunks that are of no other."""
    found = {}
    for context in ("sink", "document", "neighbours"):
        result = cli("precompute", "docs", *SMALL, "--context", context, "--yes", "--json")
        assert result.code == 0, result.err
        found[context] = {r["id"] for r in result.records}
    return {c: own - set().union(*(o for d, o in found.items() if d != c)) for c, own in found.items()}


def test_every_context_is_listed_with_its_chunks(cli: Cli, ids: dict[str, set[str]]) -> None:
    listed = {r["id"]: r["context"] for r in cli("chunks", "ls", "--json").records}
    for context, own in ids.items():
        assert own
        assert {listed[i] for i in own} == {context}
    again = cli("precompute", "docs", *SMALL, "--context", "neighbours", "--json")
    assert {r["status"] for r in again.records} == {"unchanged"}


@pytest.mark.parametrize("context", ["sink", "document", "neighbours"])
def test_search_finds_a_passage_once_and_in_the_context_that_was_asked_for(
    cli: Cli, ids: dict[str, set[str]], context: str
) -> None:
    found = cli("search", "beta", "-k", "20", "--json", "--context", context).records
    places = [(r["source"], r["index"]) for r in found]
    assert len(places) == len(set(places)) > 1
    others = set().union(*(own for c, own in ids.items() if c != context))
    assert not {r["id"] for r in found} & others


def test_a_document_without_the_context_is_found_in_another(cli: Cli, docs: Path) -> None:
    cli("precompute", "docs/alpha.md", *SMALL, "--context", "neighbours")
    cli("precompute", "docs/beta.md", *SMALL, "--context", "sink")
    listed = {r["id"]: r["context"] for r in cli("chunks", "ls", "--json").records}
    asked = cli("ask", "alpha beta", "-k", "20", *SHORT)
    assert {listed[c["id"]] for c in asked.records[0]["chunks"]} == {"neighbours", "sink"}


def test_ask_takes_what_is_exact_where_it_is_stored(cli: Cli, ids: dict[str, set[str]]) -> None:
    record = cli("ask", "beta", "-k", "20", *SHORT).records[0]
    assert record["exact_tokens"] > record["chunks"][0]["tokens"]
    first = record["chunks"][0]["source"]
    for chunk in record["chunks"]:
        expected = "exact" if chunk["source"] == first else "blended"
        assert chunk["status"] == expected
        assert (chunk["id"] in ids["document"]) <= (expected == "exact")
    named = [c["id"] for c in cli("search", "beta", "-k", "20", "--json").records]
    asked = cli("ask", "beta", "--chunks", ",".join(named), *SHORT).records[0]
    assert [c["id"] for c in asked["chunks"]] == named


def test_an_unknown_context_is_said_before_anything_is_loaded(cli: Cli, stored: list[str]) -> None:
    for command in (("search", "who"), ("precompute", "docs"), ("eval", "x.json")):
        result = cli(*command, "--context", "x")
        assert result.code == 2
        assert "'x'" in result.err
        assert "sink, document, neighbours" in result.err
    assert cli("precompute", "docs", "--neighbours", "0").code == 2
    assert cli("precompute", "docs", "--window", "0").code == 2


def test_rm_takes_a_document_in_every_context(cli: Cli, ids: dict[str, set[str]]) -> None:
    assert cli("chunks", "rm", "--source", "docs/beta.md").code == 0
    assert {r["source"] for r in cli("chunks", "ls", "--json").records} == {"docs/alpha.md"}


def test_eval_measures_neighbours_and_knows_when_the_corpus_is_another(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {"question": "who?", "ctxs": [{"text": "the lead of billing is Mara"}, {"text": "billing is in Bergen"}]},
        {"question": "where?", "ctxs": [{"text": "Mara works near the harbor"}, {"text": "a parrot at home"}]},
    ]
    (tmp_path / "one.json").write_text(json.dumps(rows[:1]))
    (tmp_path / "two.json").write_text(json.dumps(rows))
    flags = ("--context", "sink", "--context", "neighbours", "--mode", "reuse", "--resume", "r.jsonl", "--json")
    [_, sink, neighbours, _] = cli("eval", "one.json", *flags).records
    assert (sink["label"], neighbours["label"]) == ("reuse, sink", "reuse, neighbours")
    assert sink["kl"]["value"] != neighbours["kl"]["value"]
    assert "0 records" in cli("eval", "one.json", *flags).err
    assert "0 records" in cli("eval", "one.json", *flags, "--neighbours", "3", "--window", "2048").err
    assert "1 records" in cli("eval", "one.json", *flags, "--neighbours", "2").err
    assert "1 records" in cli("eval", "one.json", *flags, "--window", "30").err
    assert "5 records" in cli("eval", "two.json", *flags).err  # the first question's neighbours are others now
