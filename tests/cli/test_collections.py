"""Named collections: a name for some of the paths that were precomputed, which ask and search keep to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files import write

Cli = Callable[..., Any]


def found(cli: Cli, *flags: str) -> set[str]:
    return {r["source"] for r in cli("search", "billing", "--json", *flags).records}


@pytest.fixture
def folders(cli: Cli, tmp_path: Path) -> Path:
    for name in ("work/a.md", "wiki/b.md", "home/c.md"):
        write(tmp_path / name, f"# {name}\n\nThe lead of billing is in {name}.\n")
    assert cli("precompute", "work", "--collection", "work").code == 0
    assert cli("precompute", "wiki", "--collection", "work", "--collection", "work").code == 0
    assert cli("precompute", "home").code == 0
    return tmp_path


def test_search_and_ask_keep_to_a_collection(cli: Cli, folders: Path) -> None:
    assert found(cli, "--collection", "work") == {"work/a.md", "wiki/b.md"}
    assert found(cli) == {"work/a.md", "wiki/b.md", "home/c.md"}
    answer = cli("ask", "billing", "--collection", "work", "--max-tokens", "1", "--json")
    assert {c["source"] for c in answer.records[0]["chunks"]} == {"work/a.md", "wiki/b.md"}
    assert found(cli, "--collection", "work", "--source", "home") == {"home/c.md"}, "a source is nearer"


def test_a_path_can_be_of_several_and_stays_of_them(cli: Cli, folders: Path) -> None:
    assert cli("precompute", "wiki", "--collection", "reading").code == 0
    assert cli("precompute").code == 0
    assert found(cli, "--collection", "reading") == {"wiki/b.md"}
    assert found(cli, "--collection", "work") == {"work/a.md", "wiki/b.md"}


def test_a_collection_in_the_settings_counts_and_an_unknown_one_is_named(
    cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = cli("search", "billing", "--collection", "nothing")
    assert missing.code == 3
    assert "work" in missing.err
    monkeypatch.setenv("CACHEBLEND_COLLECTION", "work")
    assert found(cli) == {"work/a.md", "wiki/b.md"}
    assert len(found(cli, "--all")) == 3
