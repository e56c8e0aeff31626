"""A realistic folder: files that are read, files that are skipped and why, and the place of every chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore, DocumentChunk
from files import write
from mixed_folder import mixed_folder

from cacheblend_cli.corpus.documents import Document, read_documents
from cacheblend_cli.corpus.places import shown

Cli = Callable[..., Any]
TAKEN = {
    "notes.md", "plain.txt", "guide.rst", "page.html", "people.csv", "rates.tsv", "facts.json", "faq.jsonl", "src/pool.py", "src/main.go",
    "config.yaml", "study.ipynb", "mail.eml", "report.pdf", "letter.docx", "plans.pptx", "people.xlsx", "book.epub", "README",
    "a name with\nnewline \U0001f600.md", "deep/er/end.md",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return mixed_folder(tmp_path / "mixed")


def places(store: Path) -> dict[str, list[DocumentChunk]]:
    with ChunkStore.open(store) as opened:
        return {shown(record.source): list(record.chunks) for record in opened.documents()}


def test_a_folder_is_read_and_skipped_files_are_counted(cli: Cli, folder: Path, tmp_path: Path) -> None:
    result = cli("precompute", "mixed", "--chunk-tokens", "40", "--context", "sink")
    assert result.code == 0, result.err
    assert set(places(tmp_path / "store")) == {f"mixed/{name}" for name in TAKEN}
    assert " 9 files: 2 linked folders" in result.err
    assert "2 .png (images have no text); 1 " in result.err
    for told in ("1 .bin", "1 links out of the folder", "1 not UTF-8", "1 a broken link", "1 scanned PDFs"):
        assert told in result.err
    for warned in ("mixed/scan.pdf", "mixed/broken.txt"):
        assert warned in result.err
    assert "picture.png" not in result.err
    again = cli("precompute", "mixed", "-v", "--json")
    assert {r["status"] for r in again.records} == {"unchanged", "passed over"}
    assert len([r for r in again.records if r["status"] == "passed over"]) == 9
    assert "mixed/picture.png" in again.err
    write(folder / "notes.md", "# Notes\n\nSomebody else leads billing.\n")
    changed = [r for r in cli("precompute", "mixed", "--json").records if r["status"] != "unchanged"]
    assert {(r["source"], r["status"]) for r in changed} == {("mixed/notes.md", "replaced")}


def test_every_chunk_leads_back_to_its_text_and_its_place(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert cli("precompute", "mixed", "--chunk-tokens", "40", "--context", "sink").code == 0
    documents = {shown(d.source): d for d in read_documents(["mixed"]) if isinstance(d, Document)}
    with ChunkStore.open(tmp_path / "store") as store:
        for name, chunks in places(tmp_path / "store").items():
            text = documents[name].text
            for chunk in chunks:
                manifest = store.get_chunk(chunk.key)
                assert manifest is not None
                assert text[chunk.start : chunk.end] == manifest.text
                first, last = chunk.locator.lines
                if documents[name].converted.keeps_lines:
                    lines = text.split("\n")[first - 1 : last]
                    assert manifest.text.strip() in "\n".join(lines)
                    assert lines[0]
                    assert manifest.text.strip().count("\n") == last - first
                if name.endswith("report.pdf"):
                    assert chunk.locator.part.startswith("page")
    found = {c.locator.part for c in places(tmp_path / "store")["mixed/report.pdf"]}
    assert {"page 1", "page 2", "page 3"} <= found | {"pages 1-2", "pages 2-3"}


def test_files_from_a_list(cli: Cli, folder: Path, tmp_path: Path) -> None:
    names = ["mixed/notes.md", "mixed/a name with\nnewline \U0001f600.md", "mixed/picture.png"]
    result = cli("precompute", "--files-from", "-", stdin="\0".join(names) + "\0")
    assert result.code == 0, result.err
    assert set(places(tmp_path / "store")) == set(names[:2])
    assert "1 .png" in result.err
    write(tmp_path / "list", "mixed/guide.rst\r\nmixed/notes.md\n")
    assert cli("precompute", "--files-from", "list").code == 0
    assert "mixed/guide.rst" in places(tmp_path / "store")
    assert cli("precompute", "--files-from", "-", stdin="nowhere.md\n").code == 3
    assert cli("precompute", "--files-from", "-", stdin="\n").code == 2
    assert cli("precompute").code == 2


def test_what_is_taken_of_a_folder_is_remembered(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert cli("precompute", "mixed", "--include", "*.md", "--exclude", "deep/", "--max-file-size", "1MB").code == 0
    first = {"mixed/notes.md", "mixed/a name with\nnewline \U0001f600.md"}
    assert set(places(tmp_path / "store")) == first
    write(folder / "new.md", "# New\n")
    write(folder / "new.txt", "not taken\n")
    assert cli("precompute", "mixed").code == 0
    assert set(places(tmp_path / "store")) == first | {"mixed/new.md"}
    assert cli("precompute", "mixed", "--include", "").code == 0
    assert "mixed/new.txt" in places(tmp_path / "store")
    assert "mixed/deep/er/end.md" not in places(tmp_path / "store")
