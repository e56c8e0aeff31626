"""Omissions of documents: reported once in a line, listed with -v, kept in the store and shown with a chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_documents.converted import MOST_OMISSIONS, NAME_CHARACTERS, Converted
from fake_ocr import scanned_pdf
from files import write
from omitting import leave_out

from cacheblend_cli.cli.watch import _updater
from cacheblend_cli.corpus.citations import omissions_of

Cli = Callable[..., Any]
CHART, PAGE = "2 charts (slides 3, 5)", "page 2 cannot be read"


@pytest.fixture
def decks(docs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with two documents that are read in part, beside two that are read in full."""
    leave_out(monkeypatch, {"deck.pptx": [CHART, PAGE], "plan.docx": ["1 diagram"]})
    write(docs / "deck.pptx", "The harbor deck.\n")
    write(docs / "plan.docx", "The harbor plan.\n")
    return docs


def lines(result: Any) -> list[str]:
    """The messages about what is left out."""
    assert result.code == 0, result.err
    return [line for line in result.err.splitlines() if "left out" in line]


def test_one_line_tells_of_many_documents_and_an_update_does_not_repeat_it(cli: Cli, decks: Path) -> None:
    told = f"parts of 2 documents are left out, for example of docs/deck.pptx: {CHART}; {PAGE}; -v lists them"
    assert lines(cli("precompute", "docs", "--dry-run")) == [f"warning: {told}"]
    assert lines(cli("precompute", "docs", "--quiet")) == [f"warning: {told}"]
    for again in ((), ("--verify-files",), ("--force",)):
        assert lines(cli("precompute", "docs", *again)) == []
    listed = [f"docs/deck.pptx: left out: {CHART}; {PAGE}", "docs/plan.docx: left out: 1 diagram"]
    assert lines(cli("precompute", "docs", "-v")) == [*listed, "warning: parts of 2 documents are left out"]


def test_a_single_document_is_told_with_its_first_omissions(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch, {"deck.pptx": [f"{n} charts" for n in range(2, 7)]})
    write(docs / "deck.pptx", "The harbor deck.\n")
    told = "warning: docs/deck.pptx: left out: 2 charts; 3 charts; 4 charts; 2 more, -v lists them"
    assert lines(cli("precompute", "docs")) == [told]


def test_changed_omissions_of_the_same_text_are_reported(
    cli: Cli, decks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("precompute", "docs").code == 0
    leave_out(monkeypatch, {"deck.pptx": ["1 comment"]})
    result = cli("precompute", "docs", "--verify-files", "--json")
    assert lines(result) == ["warning: docs/deck.pptx: left out: 1 comment"]
    assert {record["status"] for record in result.records} == {"unchanged"}
    shown = cli("chunks", "show", next(r["id"] for r in result.records if r["source"] == "docs/deck.pptx"), "--json")
    assert shown.records[0]["omissions"] == ["1 comment"]


def test_json_has_the_omissions_with_the_first_chunk_of_a_document(cli: Cli, decks: Path) -> None:
    write(decks / "deck.pptx", "\n\n".join(f"Slide {n} of the harbor deck is about billing." for n in range(12)))
    for status in ("new", "unchanged"):
        records = cli("precompute", "docs", "--chunk-tokens", "40", "--json").records
        keys = {"id", "source", "index", "tokens", "bytes", "status"}
        assert all(record.keys() - {"omissions"} == keys for record in records)
        told = {(r["source"], r["index"]): r["omissions"] for r in records if "omissions" in r}
        assert told == {("docs/deck.pptx", 0): [CHART, PAGE], ("docs/plan.docx", 0): ["1 diagram"]}
        assert {record["status"] for record in records} == {status}
    assert len([record for record in records if record["source"] == "docs/deck.pptx"]) > 1
    [dry] = cli("precompute", "docs", "--dry-run", "--json").records
    assert dry["omissions"] == {"docs/deck.pptx": [CHART, PAGE], "docs/plan.docx": ["1 diagram"]}


def test_a_chunk_is_shown_with_the_omissions_of_its_document(cli: Cli, decks: Path) -> None:
    """Also when the KV does not fit the quota, so that the store keeps no state of the file."""
    result = cli("precompute", "docs", "--max-size", "1", "--json")
    ids = {record["source"]: record["id"] for record in result.records}
    shown = cli("chunks", "show", ids["docs/deck.pptx"]).out.splitlines()
    assert [line for line in shown if CHART in line or PAGE in line] == [
        f"left out      {CHART}",
        f"left out      {PAGE}",
    ]
    assert "left out" not in cli("chunks", "show", ids["docs/alpha.md"]).out
    assert cli("chunks", "show", ids["docs/alpha.md"], "--json").records[0]["omissions"] == []


def test_a_watched_folder_tells_of_new_omissions_once(
    cli: Cli, decks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    updates = []
    monkeypatch.setattr("watchfiles.watch", lambda *folders, **options: iter(()))

    def updater(engine: Any, settings: Any, paths: Any, output: Any) -> Callable[[], Any]:
        update = _updater(engine, settings, paths, output)
        updates.extend((update(), write(decks / "plan.docx", "Another harbor plan.\n"), update()))
        return update

    monkeypatch.setattr("cacheblend_cli.cli.watch._updater", updater)
    told = lines(cli("precompute", "docs", "--watch"))
    assert len(updates) == 3
    assert [line for line in told if "parts of" not in line] == ["warning: docs/plan.docx: left out: 1 diagram"]


def test_a_page_without_text_is_reported(cli: Cli, docs: Path) -> None:
    write(docs / "half.pdf", scanned_pdf(["Mara leads billing.", ""]))
    [told] = lines(cli("precompute", "docs"))
    assert told.startswith("warning: docs/half.pdf: left out: ")


def test_omissions_are_bounded_and_on_one_line() -> None:
    found = Converted("", omissions=("1 sheet\n(\x1b[31mred\u202e)", *("x" * 1000 for _ in range(100))))
    assert len(found.omissions) == MOST_OMISSIONS
    assert {len(text) for text in found.omissions[1:]} == {NAME_CHARACTERS}
    assert found.omissions[0] == "1 sheet ([31mred)"


def test_omissions_travel_with_the_document(
    cli: Cli, decks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [chunk] = [r["id"] for r in cli("precompute", "docs", "--json").records if r["source"] == "docs/deck.pptx"]
    assert cli("chunks", "push", (tmp_path / "tier").as_uri()).code == 0
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "other"))
    assert cli("chunks", "pull", (tmp_path / "tier").as_uri()).code == 0
    assert cli("chunks", "show", chunk, "--json").records[0]["omissions"] == [CHART, PAGE]
    assert lines(cli("precompute", "docs")) == []


@pytest.mark.parametrize("found", [None, "a chart", {"a": 1}, [1, None, ["x"]]])
def test_records_with_other_omissions_have_none(found: object) -> None:
    assert omissions_of({} if found is None else {"omissions": found}) == ()
