"""Renamed and deleted files: a renamed folder is followed in silence, a citation of a deleted file says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cacheblend_cli.corpus.citations import FILE_GONE, Citation

Cli = Callable[..., Any]


def test_a_renamed_folder_is_followed_without_a_warning(cli: Cli, stored: list[str], docs: Path) -> None:
    docs.rename(docs.with_name("pages"))
    assert "docs/alpha.md is pages/alpha.md now" in cli("precompute", "pages").err
    for _ in range(2):
        again = cli("precompute")
        assert again.code == 0
        assert "no longer exists" not in again.err


def test_a_folder_that_is_gone_with_its_documents_is_named(cli: Cli, stored: list[str], docs: Path) -> None:
    (docs.parent / "more").mkdir()
    (docs.parent / "more" / "gamma.md").write_text("gamma alpha\n")
    cli("precompute", "more")
    docs.rename(docs.parent / ".hidden")
    assert f"{docs} no longer exists; chunks rm --source {docs}" in " ".join(cli("precompute").err.split())
    cli("chunks", "rm", "--source", "docs", "--yes")
    assert "no longer exists" not in cli("precompute").err


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
