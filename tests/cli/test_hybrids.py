"""A model with recurrent layers, from the command line: what is restored is said, and what it cannot do is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_hybrids
import pytest

PAGES = ("the lead of billing is Mara and she works in Bergen\n\n", "Jonas keeps a parrot at home\n\n", "Mara left\n")


@pytest.fixture
def store(cli: Callable[..., Any], tmp_path: Path) -> tuple[str, ...]:
    hub_hybrids.QWEN.write(tmp_path / "m")
    (tmp_path / "docs").mkdir()
    for number in range(3):
        (tmp_path / "docs" / f"{number}.md").write_text("".join(PAGES) * (number + 1))
    flags = ("--model", str(tmp_path / "m"), "--store", str(tmp_path / "store"))
    assert cli("precompute", str(tmp_path / "docs"), "--chunk-tokens", "16", *flags).code == 0
    return flags


def ids_of(cli: Callable[..., Any], flags: tuple[str, ...], name: str) -> list[str]:
    records = [json.loads(line) for line in cli("chunks", "ls", "--json", *flags[2:]).out.splitlines()]
    return [r["id"] for r in sorted(records, key=lambda r: r["index"]) if r["source"].endswith(name)]


def test_an_answer_says_what_was_restored(cli: Callable[..., Any], store: tuple[str, ...]) -> None:
    first, second = ids_of(cli, store, "0.md"), ids_of(cli, store, "2.md")
    chunks = ",".join([*first, *second])
    told = cli("ask", "who is Mara?", "--chunks", chunks, "--max-tokens", "3", "-v", *store)
    assert "restored, the others computed: the model has recurrent layers" in told.err
    assert "first token: restored" in told.err
    answer = json.loads(cli("ask", "who is Mara?", "--chunks", chunks, "--max-tokens", "3", "--json", *store).out)
    status = [chunk["status"] for chunk in answer["chunks"]]
    assert status == ["exact"] * len(first) + ["computed"] * len(second)
    assert answer["ratio_from"].startswith("none: recurrent layers")
    assert answer["notes"] == []
    again = json.loads(cli("ask", "who is Mara?", "--chunks", chunks, "--max-tokens", "3", "--json", *store).out)
    assert again["answer"] == answer["answer"]
    assert cli("chunks", "verify", *store[2:]).code == 0


def test_a_search_restores_a_document(cli: Callable[..., Any], store: tuple[str, ...]) -> None:
    ask = "ask", "who keeps a parrot?", "--top-k", "1", "--max-tokens", "3", "--json"
    answer = json.loads(cli(*ask, *store).out)
    assert {chunk["status"] for chunk in answer["chunks"]} == {"exact"}
    assert [chunk["rank"] for chunk in answer["chunks"]][-1] == 1


@pytest.mark.parametrize("flag", [("--ratio", "0.3"), ("--ratio", "auto"), ("--mode", "reuse")])
def test_what_a_hybrid_cannot_do_is_refused(
    cli: Callable[..., Any], store: tuple[str, ...], flag: tuple[str, str]
) -> None:
    last = ids_of(cli, store, "2.md")[-1]
    told = cli("ask", "who?", "--chunks", last, "--max-tokens", "3", *flag, *store)
    assert told.code == 2
    assert "recurrent layers" in told.err


def test_models_show_and_check(cli: Callable[..., Any], store: tuple[str, ...]) -> None:
    shown = json.loads(cli("models", "show", store[1], "--json").out)
    assert (shown["layers"], shown["recurrent_layers"]) == (8, 6)
    assert shown["ratio"].startswith("none")
    record = json.loads(cli("models", "check", store[1], "--json", *store[2:]).out)
    assert record["passed"]
    assert record["profile"] is None


def test_fewer_states_are_stored_on_request(cli: Callable[..., Any], store: tuple[str, ...], tmp_path: Path) -> None:
    def num_bytes(path: str, *more: str) -> int:
        flags = ("--model", store[1], "--store", path)
        assert cli("precompute", str(tmp_path / "docs"), "--chunk-tokens", "16", *more, *flags).code == 0
        return int(json.loads(cli("chunks", "stats", "--json", *flags[2:]).out)["live_bytes"])

    assert num_bytes(str(tmp_path / "few"), "--state-every", "4") < num_bytes(str(tmp_path / "all"))
    assert cli("precompute", str(tmp_path / "docs"), "--state-every", "0", *store).code == 2


def test_there_is_nothing_to_compare(cli: Callable[..., Any], store: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "who is Mara?", "answer": "Mara"}\n')
    for command in (("eval", str(tmp_path / "q.jsonl"), *store), ("bench", *store[:2], "--tokens", "64")):
        told = cli(*command)
        assert told.code == 3
        assert "has recurrent layers" in told.err
        assert "nothing is blended" in told.err
