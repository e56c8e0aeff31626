"""Settings that the store remembers for precomputed paths, and the announced cost of changing them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from projects import MARA, listed, write

from cacheblend_cli.cli.main import run

Cli = Callable[..., Any]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def statuses(cli: Cli, *arguments: str) -> list[str]:
    result = cli("precompute", *arguments, "--json")
    assert result.code == 0, result.err
    return [r["status"] for r in result.records]


def ids(cli: Cli, *arguments: str) -> set[str]:
    result = cli("precompute", *arguments, "-q")
    assert result.code == 0, result.err
    return set(result.out.split())


def stored_ids(cli: Cli) -> set[str]:
    return set(cli("chunks", "ls", "-q").out.split())


@pytest.mark.parametrize(
    "flags",
    [
        ("--chunk-tokens", "40"),
        ("--context", "sink"),
        ("--kv-dtype", "int4"),
        ("--window", "60", "--chunk-tokens", "40"),
    ],
)
def test_a_run_without_a_setting_takes_what_was_said_before(cli: Cli, docs: Path, flags: tuple[str, ...]) -> None:
    first = ids(cli, "docs", *flags)
    assert set(statuses(cli, "docs")) == {"unchanged"}
    write(docs / "gamma.md", "gamma " + (docs / "alpha.md").read_text())
    again = ids(cli, "docs")
    assert again > first
    assert again == ids(cli, "docs", *flags)
    os.chdir(docs)
    assert ids(cli, ".") == again
    assert ids(cli, "alpha.md") < first
    os.chdir(docs.parent)
    assert ids(cli, ".") == again
    assert stored_ids(cli) == again


def test_another_setting_says_what_it_costs_and_waits_for_a_yes(cli: Cli, docs: Path) -> None:
    first = ids(cli, "docs", "--chunk-tokens", "40")
    refused = cli("precompute", "docs", "--chunk-tokens", "64")
    assert refused.code == 2
    assert all(fact in refused.err for fact in ("2 documents", "--chunk-tokens 40", "--chunk-tokens 64"))
    assert all(fact in refused.err for fact in ("112 tokens", "113.5 KiB"))
    assert "--yes" in refused.err
    assert stored_ids(cli) == first
    assert set(statuses(cli, "docs")) == {"unchanged"}, "what was refused is not remembered"
    second = ids(cli, "docs", "--chunk-tokens", "64", "--yes")
    assert stored_ids(cli) == second != first
    assert set(statuses(cli, "docs")) == {"unchanged"}
    assert cli("precompute", "docs", "--chunk-tokens", "64").code == 0


def test_the_environment_and_a_file_are_asked_about_too(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids(cli, "docs", "--chunk-tokens", "40")
    (docs.parent / "cacheblend.toml").write_text("chunk_tokens = 50\n")
    assert cli("precompute", "docs").code == 2
    monkeypatch.setenv("CACHEBLEND_CHUNK_TOKENS", "40")
    assert set(statuses(cli, "docs")) == {"unchanged"}
    assert cli("precompute", "docs", "--chunk-tokens", "50").code == 2


@pytest.mark.parametrize(
    ("answer", "goes_on"), [("y", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_terminal_is_asked(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, answer: str, goes_on: bool) -> None:
    first = ids(cli, "docs", "--chunk-tokens", "40")
    err = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["precompute", "docs", "--chunk-tokens", "64"]) == 0
    assert "[y/N]" in err.getvalue()
    assert (stored_ids(cli) == first) != goes_on


def test_nothing_is_asked_where_nothing_is_computed_again(cli: Cli, docs: Path) -> None:
    ids(cli, "docs/alpha.md", "--chunk-tokens", "400")
    assert set(statuses(cli, "docs/alpha.md", "--chunk-tokens", "500")) == {"unchanged"}
    assert statuses(cli, "docs/beta.md", "--chunk-tokens", "40")
    (docs / "beta.md").write_text("beta is another page now\n")
    assert statuses(cli, "docs/beta.md") == ["replaced"]
    assert set(statuses(cli, "docs", "--force")) == {"unchanged"}


def test_every_document_keeps_the_settings_of_its_nearest_root(cli: Cli, docs: Path) -> None:
    write(docs / "sub/delta.md", "delta " + (docs / "alpha.md").read_text())
    whole = ids(cli, "docs", "--chunk-tokens", "40")
    sub = ids(cli, "docs/sub", "--chunk-tokens", "20", "--yes")
    after = stored_ids(cli)
    assert set(statuses(cli, ".")) == {"unchanged"}
    assert stored_ids(cli) == after > sub
    write(docs / "sub/new.md", "one two three " + (docs / "beta.md").read_text())
    small = [r for r in cli("precompute", "docs", "--json").records if r["source"] == "docs/sub/new.md"]
    assert all(r["tokens"] <= 20 for r in small)
    assert ids(cli, "docs", "--chunk-tokens", "40", "--yes") > whole, "what is said of a root goes for those below it"
    assert not sub & stored_ids(cli)
    assert set(statuses(cli, "docs/sub")) == {"unchanged"}


def test_a_moved_root_keeps_its_settings(cli: Cli, docs: Path) -> None:
    first = ids(cli, "docs", "--chunk-tokens", "40")
    docs.rename(docs.parent / "pages")
    assert ids(cli, "pages") == first
    assert listed(cli) == {"pages/alpha.md", "pages/beta.md"}


def test_a_store_without_memory_goes_by_what_its_documents_are(cli: Cli, docs: Path, tmp_path: Path) -> None:
    first = ids(cli, "docs", "--chunk-tokens", "40", "--context", "sink")
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (txn, dbs):
        for memo in store.memos("root"):
            txn.delete(memo.key, db=dbs["meta"])
    assert ids(cli, "docs") == first
    assert cli("precompute", "docs", "--chunk-tokens", "64").code == 2


def test_another_model_takes_the_settings_and_keeps_its_own(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids(cli, "docs", "--chunk-tokens", "40")
    other = ("--dtype", "bfloat16")
    assert all(r["tokens"] <= 40 for r in cli("precompute", "docs", *other, "--json").records)
    assert cli("precompute", "docs", *other, "--chunk-tokens", "20").code == 2
    ids(cli, "docs", *other, "--chunk-tokens", "20", "--yes")
    assert set(statuses(cli, "docs")) == {"unchanged"}
    assert set(statuses(cli, "docs", *other)) == {"unchanged"}
    assert set(statuses(cli, "docs", "--salt", "x", "--chunk-tokens", "30")) == {"new"}
    assert set(statuses(cli, "docs")) == {"unchanged"}


def test_a_document_that_a_link_leads_to_goes_with_the_link(cli: Cli, tmp_path: Path, docs: Path) -> None:
    far = write(tmp_path / "far/page.md", MARA)
    (docs / "page.md").symlink_to(far)
    (docs / "more").symlink_to(far.parent)
    write(tmp_path / "far/other.md", "other")
    ids(cli, "docs")
    assert listed(cli) == {"docs/alpha.md", "docs/beta.md"}, "a link out of the folder is not followed"
    ids(cli, "docs", "--follow")
    everything = {"docs/alpha.md", "docs/beta.md", "far/page.md", "far/other.md"}
    assert listed(cli) == everything
    (docs / "page.md").unlink()
    ids(cli, "docs")
    assert listed(cli) == everything, "another link leads to it"
    ids(cli, "far/other.md")
    (docs / "more").unlink()
    assert "far/page.md" in cli("precompute", "docs").err
    assert listed(cli) == everything - {"far/page.md"}, "the other was given by its own name"


def test_an_empty_folder_has_no_links(cli: Cli, tmp_path: Path) -> None:
    """A folder that lost its last link, and so its last document, does not keep what the link led to."""
    write(tmp_path / "far/page.md", MARA)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "more").symlink_to(tmp_path / "far")
        ids(cli, folder.name, "--follow")
    for folder in folders:
        (folder / "more").unlink()
        cli("precompute", folder.name, "--yes")
    assert listed(cli) == set()


def test_a_dry_run_says_what_differs_from_the_store(cli: Cli, docs: Path) -> None:
    def difference(*flags: str) -> dict[str, int]:
        [facts] = cli("precompute", "docs", "--dry-run", "--json", *flags).records
        return {name: facts[name]["chunks"] for name in ("new", "replaced", "unchanged", "removed")}

    ids(cli, "docs", "--chunk-tokens", "40")
    count = len(stored_ids(cli))
    before = (docs.parent / "store/data.mdb").read_bytes()
    assert difference() == {"new": 0, "replaced": 0, "unchanged": count, "removed": 0}
    [facts] = cli("precompute", "docs", "--dry-run", "--json").records
    assert facts["seconds"] == 0
    write(docs / "gamma.md", "gamma\n")
    (docs / "alpha.md").write_text((docs / "alpha.md").read_text() + "\nand more of it at the end\n")
    (docs / "beta.md").unlink()
    found = difference()
    assert found["new"] == 1
    assert found["replaced"] >= 1
    assert found["removed"] >= found["replaced"]
    other = cli("precompute", "docs", "--dry-run", "--chunk-tokens", "64")
    assert other.code == 0
    assert all(fact in other.err for fact in ("1 document", "--chunk-tokens 40", "--chunk-tokens 64"))
    assert before == (docs.parent / "store/data.mdb").read_bytes()
    done = cli("precompute", "docs", "--json")
    assert [r["status"] for r in done.records].count("new") == found["new"]
    assert [r["status"] for r in done.records].count("replaced") == found["replaced"]
    assert [r["status"] for r in done.records].count("unchanged") == found["unchanged"]
    assert f"{found['removed']} removed" in done.err
    (docs / "gamma.md").rename(docs / "delta.md")
    assert difference()["removed"] == difference()["new"] == 0


def test_an_interrupted_run_is_gone_on_with_as_it_began(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_cli.collect.collector import Collector

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "begin", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli("precompute", "docs", "--chunk-tokens", "40").code == 130
    assert all(r["tokens"] <= 40 for r in cli("precompute", "docs", "--json").records)
