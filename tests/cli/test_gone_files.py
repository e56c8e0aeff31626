"""Renamed, deleted and unreadable files: a renamed folder is followed in silence, what cannot be read and folders that
lost all their documents keep what is stored, a citation of a deleted file says so."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from projects import listed, write

from cacheblend_cli.cli.main import run
from cacheblend_cli.corpus.citations import FILE_CHANGED, FILE_GONE, Citation
from cacheblend_cli.corpus.places import on_disk

Cli = Callable[..., Any]
BOTH = {"docs/alpha.md", "docs/beta.md"}


def unmount(docs: Path) -> None:
    shutil.rmtree(docs)
    docs.mkdir()


def mount_another(docs: Path) -> None:
    unmount(docs)
    write(docs / "gamma.md", "gamma\n")


def become_a_file(docs: Path) -> None:
    shutil.rmtree(docs)
    write(docs, "a text\n")


LOSSES = {unmount: set[str](), mount_another: {"docs/gamma.md"}, become_a_file: {"docs"}}


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_a_folder_that_lost_all_its_documents_keeps_what_is_stored(cli: Cli, docs: Path, lose: Callable) -> None:
    write(docs.parent / "more/delta.md", "delta\n")
    cli("precompute", "docs", "more")
    lose(docs)
    assert cli("precompute", "docs", "--dry-run", "--json").records[0]["removed"]["chunks"] == 0
    for _ in range(2):
        for arguments in (("docs",), ()):
            result = cli("precompute", *arguments)
            assert result.code == 3
            assert "cacheblend precompute docs --yes" in result.err
            assert listed(cli) == BOTH | {"more/delta.md"}
    assert "docs/alpha.md is gone" in cli("precompute", "docs", "--yes").err
    assert listed(cli) == LOSSES[lose] | {"more/delta.md"}


def test_of_a_folder_within_another_and_of_one_behind_links_all_is_kept_too(
    cli: Cli, docs: Path, tmp_path: Path
) -> None:
    inner, far = write(docs / "sub/inner.md", "inner\n"), write(tmp_path / "far/page.md", "far\n")
    (docs / "more").mkdir()
    (docs / "more/link.md").symlink_to(far)
    cli("precompute", "docs/sub", "docs/more", "--follow")
    cli("precompute", "docs")
    inner.unlink()
    (docs / "more/link.md").unlink()
    (docs / "beta.md").unlink()
    assert cli("precompute", "docs/more").code == 3
    result = cli("precompute")
    assert result.code == 3
    assert "docs/sub" in result.err
    assert listed(cli) == {"docs/alpha.md", "docs/sub/inner.md", "far/page.md"}, "one of many is removed as ever"
    cli("precompute", "--yes")
    assert listed(cli) == {"docs/alpha.md"}


def test_a_folder_of_another_salt_keeps_what_is_stored(cli: Cli, docs: Path) -> None:
    for name in ("one", "two"):
        (docs / "sub").mkdir(exist_ok=True)
        (docs / "sub" / f"{name}.md").write_text(f"{name} is a page\n")
    assert cli("precompute", "docs/sub", "--salt", "a").code == 0
    assert cli("precompute", "docs", "--salt", "b").code == 0
    before = cli("chunks", "ls", "--json").out
    (docs / "sub").rename("away")
    (docs / "sub").mkdir()
    result = cli("precompute", "docs", "--salt", "b")
    assert result.code == 3
    assert cli("chunks", "ls", "--json").out.count("sub") == before.count("sub") > 0
    (docs / "sub").rmdir()
    hint = cli("precompute", "docs", "--salt", "b").err
    assert "chunks rm --source docs/sub --yes" in hint, "precompute could not find it"


def test_a_missing_folder_is_a_failure_though_others_are_there(cli: Cli, docs: Path, tmp_path: Path) -> None:
    write(tmp_path / "more/delta.md", "delta\n")
    cli("precompute", "docs", "more")
    docs.rename(tmp_path / ".away")
    write(tmp_path / "more/new.md", "new\n")
    assert cli("precompute").code == 3
    assert listed(cli) == BOTH | {"more/delta.md", "more/new.md"}


def test_what_moved_is_not_lost(cli: Cli, docs: Path, tmp_path: Path) -> None:
    cli("precompute", "docs")
    (docs / "deep").mkdir()
    for file in docs.glob("*.md"):
        file.rename(docs / "deep" / file.name)
    assert cli("precompute").code == 0
    assert listed(cli) == {"docs/deep/alpha.md", "docs/deep/beta.md"}


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("\n", False), ("", False)])
def test_a_terminal_is_asked(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    cli("precompute", "docs")
    unmount(docs)
    err = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["precompute"]) == (0 if gone else 3)
    assert "2 stored documents" in err.getvalue()
    assert "[y/N]" in err.getvalue()
    assert listed(cli) == (set() if gone else BOTH)


@pytest.mark.parametrize("data", [b"", b" \n", b"half of a lett\xc3", b"\0\1"])
@pytest.mark.parametrize("arguments", [("docs",), (), ("docs/beta.md",)])
def test_a_file_that_is_no_document_now_keeps_what_is_stored(
    cli: Cli, docs: Path, data: bytes, arguments: tuple[str, ...]
) -> None:
    write(docs / "never.md", "")
    assert cli("precompute", "docs").code == 0
    before = (docs / "beta.md").read_bytes()
    (docs / "beta.md").write_bytes(data)
    result = cli("precompute", *arguments)
    assert result.code == 2
    assert "docs/beta.md" in result.err.splitlines()[-2]
    assert "never.md" not in result.err.splitlines()[-2]
    assert listed(cli) == BOTH
    (docs / "beta.md").write_bytes(before)
    assert {r["status"] for r in cli("precompute", *arguments, "--json").records} == {"unchanged"}


def test_a_path_that_cannot_be_looked_up_may_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    assert on_disk(str(tmp_path / "none")) is None
    monkeypatch.setattr(os, "lstat", unreachable)
    assert on_disk(str(tmp_path / "none")) is not None


def test_a_renamed_folder_is_followed_without_a_warning(cli: Cli, stored: list[str], docs: Path) -> None:
    docs.rename(docs.with_name("pages"))
    assert "docs/alpha.md is pages/alpha.md now" in cli("precompute", "pages").err
    for _ in range(2):
        again = cli("precompute")
        assert again.code == 0
        assert "cannot be found" not in again.err


def test_a_folder_that_is_gone_with_its_documents_is_named(cli: Cli, stored: list[str], docs: Path) -> None:
    (docs.parent / "more").mkdir()
    (docs.parent / "more" / "gamma.md").write_text("gamma alpha\n")
    cli("precompute", "more")
    docs.rename(docs.parent / ".hidden")
    assert f"{docs} cannot be found; if it was deleted: chunks rm --source {docs}" in " ".join(
        cli("precompute").err.split()
    )
    cli("chunks", "rm", "--source", "docs", "--yes")
    assert "cannot be found" not in cli("precompute").err


def test_a_citation_of_a_deleted_file_says_so(cli: Cli, stored: list[str], docs: Path) -> None:
    (docs / "alpha.md").unlink()
    asked = ("ask", "alpha beta?", "-k", "20", "--max-tokens", "2", "--local")
    places = {chunk["source"]: chunk["place"] for chunk in cli(*asked, "--json").records[0]["chunks"]}
    assert FILE_GONE in places["docs/alpha.md"]
    assert FILE_GONE not in places["docs/beta.md"]
    [said] = {FILE_GONE in line for line in cli(*asked, "-v").err.splitlines() if line.startswith("source: docs/alpha")}
    assert said
    assert FILE_GONE in cli("chunks", "show", stored[0]).out


def test_documents_that_never_were_files_do_not_count_as_deleted() -> None:
    for name in ("(put)/me/a", "(sent)/me/b", "/nowhere//-"):
        assert Citation(name, 0).place == ""
    assert Citation("/nowhere/a.md", 0).place == FILE_GONE


def older(file: Path) -> None:
    """Give a file an earlier time than when it was read, as a copy from elsewhere has."""
    os.utime(file, ns=(1, 1))


def edited(file: Path) -> None:
    file.write_text(file.read_text() + "\nand more\n")


def edited_earlier(file: Path) -> None:
    edited(file)
    older(file)


def replaced_by_one_of_the_same_size(file: Path) -> None:
    file.write_text(file.read_text().swapcase())


def emptied(file: Path) -> None:
    file.write_text("")


WITHOUT_KV = ("--max-size", "20KB")


@pytest.mark.parametrize(
    ("change", "flags", "marked"),
    [
        (edited, (), True),
        (edited, WITHOUT_KV, True),
        (edited_earlier, (), True),
        (replaced_by_one_of_the_same_size, (), True),
        (emptied, (), True),
        (Path.touch, (), False),
        (Path.touch, WITHOUT_KV, False),
        (older, (), False),
    ],
)
def test_a_citation_of_a_file_that_has_changed_says_so(
    cli: Cli, docs: Path, change: Callable, flags: tuple[str, ...], marked: bool
) -> None:
    cli("precompute", "docs", *flags)
    change(docs / "alpha.md")
    asked = ("ask", "alpha beta?", "-k", "20", "--max-tokens", "2", "--local")
    places = {chunk["source"]: chunk["place"] for chunk in cli(*asked, "--json").records[0]["chunks"]}
    assert (FILE_CHANGED in places["docs/alpha.md"]) == marked
    assert FILE_CHANGED not in places["docs/beta.md"]
    [shown] = cli("chunks", "ls", "--source", "docs/alpha.md", "--limit", "1", "-q").out.split()
    assert (FILE_CHANGED in cli("chunks", "show", shown).out) == marked
    if change is not emptied:
        cli("precompute", "docs")
        assert FILE_CHANGED not in cli(*asked, "-v").err


def test_a_file_that_is_converted_is_marked_by_its_time(cli: Cli, docs: Path) -> None:
    page = write(docs / "page.html", "<p>alpha works in Bergen</p>")
    cli("precompute", "docs")
    [chunk] = cli("chunks", "ls", "--source", "docs/page.html", "-q").out.split()
    assert FILE_CHANGED not in cli("chunks", "show", chunk).out
    older(page)
    assert FILE_CHANGED in cli("chunks", "show", chunk).out
    cli("precompute", "docs")
    assert FILE_CHANGED not in cli("chunks", "show", chunk).out
