"""Deleting more than one document asks on a terminal and wants --yes elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkManifest
from cacheblend_store.reader import StoreReader

from cacheblend_cli.cli.main import run

Cli = Callable[..., Any]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def count(cli: Cli) -> int:
    return len(cli("chunks", "ls", "-q").out.split())


MANY = [("rm", "--all"), ("rm", "--source", "docs"), ("rm", "--source", "docs/*"), ("prune", "--model", "MODEL")]


@pytest.mark.parametrize("command", MANY, ids=" ".join)
def test_a_script_needs_yes(cli: Cli, stored: list[str], model: Path, command: tuple[str, ...]) -> None:
    command = tuple(word.replace("MODEL", str(model)) for word in command)
    refused = cli("chunks", *command)
    assert (refused.code, refused.out) == (2, "")
    assert "2 documents, " in refused.err
    assert " of KV" in refused.err
    assert "--yes" in refused.err
    assert count(cli) == len(stored)
    assert cli("chunks", *command, "--yes").code == 0
    assert count(cli) == 0


@pytest.mark.parametrize("command", [("--all",), ("--source", "docs"), ("--source", "d*")], ids=" ".join)
def test_a_removed_folder_is_forgotten(cli: Cli, docs: Path, command: tuple[str, ...]) -> None:
    def remembered() -> list[str]:
        return cli("chunks", "stats", "--json").records[0]["remembered"]

    cli("precompute", "docs")
    assert remembered() == ["docs"]
    assert "docs" in cli("chunks", "stats").out.splitlines()[3]
    assert cli("chunks", "rm", *command, "--yes", "--json").records[0]["forgotten"] == ["docs"]
    assert remembered() == []
    assert cli("precompute").code == 3
    assert count(cli) == 0
    assert cli("precompute", "docs").code == 0, "until it is named again"
    assert remembered() == ["docs"]


def test_a_folder_of_which_something_else_was_removed_is_not_forgotten(cli: Cli, docs: Path, stored: list[str]) -> None:
    for command in (("--source", "docs/beta.md"), (stored[0],)):
        cli("chunks", "rm", *command)
        assert cli("precompute").code == 0
        assert count(cli) == len(stored)
    assert "docs: the next precompute" in cli("chunks", "rm", "--source", "docs/beta.md").err


def test_a_folder_without_documents_is_forgotten_too(cli: Cli, docs: Path) -> None:
    cli("precompute", "docs")
    cli("chunks", "rm", *map(str, cli("chunks", "ls", "-q").out.split()), "--yes")
    for file in docs.iterdir():
        file.unlink()
    cli("precompute", "docs", "--yes")
    assert cli("chunks", "rm", "--source", "docs").code == 0
    assert cli("chunks", "rm", "--source", "docs").code == 3


def test_named_chunks_of_several_documents_are_asked_about(cli: Cli, stored: list[str]) -> None:
    assert cli("chunks", "rm", stored[0], stored[-1]).code == 2
    assert count(cli) == len(stored)
    assert cli("chunks", "rm", stored[0], stored[-1], "--yes").code == 0


def test_one_document_one_chunk_and_a_dry_run_are_not_asked_about(cli: Cli, stored: list[str], model: Path) -> None:
    assert cli("chunks", "prune", "--model", str(model), "--dry-run").code == 0
    assert cli("chunks", "prune", "--to-size", "0").code == 0, "the documents stay"
    assert cli("chunks", "rm", stored[0]).code == 0
    assert cli("chunks", "rm", "--source", "docs/beta.md").code == 0
    assert cli("chunks", "rm", "--all").code == 0, "one document is left"
    assert count(cli) == 0


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_terminal_is_asked(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool
) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["chunks", "rm", "--all"]) == 0
    assert err.getvalue().startswith("delete 2 documents, ")
    assert "of KV" in err.getvalue()
    assert "? [y/N] " in err.getvalue()
    assert (count(cli) == 0) == gone


def test_the_time_of_computing_is_told_from_when_chunks_were_made(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    undamaged, of = StoreReader.undamaged, dict[bytes, float]()
    times = iter([0.0, 30.0, 60.0, 3600.0, 3630.0] + [3630.0] * 99)

    def dated(reader: StoreReader, key: bytes) -> ChunkManifest | None:
        if key not in of:
            of[key] = next(times)
        return (found := undamaged(reader, key)) and replace(found, created=of[key])

    monkeypatch.setattr(StoreReader, "undamaged", dated)
    assert "about 90 s of computing" in " ".join(cli("chunks", "rm", "--all").err.split())


def test_the_way_to_get_the_space_back_is_named(cli: Cli, docs: Path) -> None:
    (docs / "long.md").write_text("\n\n".join(f"alpha {i} beta" for i in range(2000)))
    cli("precompute", "docs")
    removed = cli("chunks", "rm", "--source", "docs/long.md")
    assert "the file keeps its size" in removed.err
    assert "cacheblend chunks compact gives" in removed.err
    assert "compact" in cli("chunks", "prune", "--to-size", "0").err, "what rm freed is still in the file"
    cli("chunks", "compact")
    assert "compact" not in cli("chunks", "rm", "--source", "docs/alpha.md").err
