"""Titles, headings and names of parts have one limit, however a document came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cacheblend_documents.converted import NAME_CHARACTERS, Converted, Mark
from cacheblend_documents.json_records import from_json_lines, from_json_records
from cacheblend_documents.mail.mail import from_mail
from cacheblend_documents.web.html import from_html
from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord, Locator
from stored_texts import put_document

from cacheblend_cli.collect.texts import document_of
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.citations import TITLE, Citations
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.corpus.search import Lookup, search

LONG = 100_000
RECORDS = [{"id": "I" * LONG + end, "text": "word " * 400} for end in "ab"]
HTML = f"<html><head><title>{'T' * LONG}</title></head><body><h1>{'H' * LONG}</h1><p>{'word ' * 400}</p></body></html>"
CODE = "".join(f"{' ' * depth}def {'d' * 110}{depth}():\n" for depth in range(200)) + " " * 200 + "word = 1\n" * 99


def chunks_of(converted: Converted) -> list[Chunk]:
    document = Document("/docs/a", converted)
    return list(cut_document(document, lambda text: tuple(text.encode()), CutSettings(512)))


@pytest.mark.parametrize(
    "converted",
    [
        from_json_records(json.dumps(RECORDS).encode()),
        from_json_lines("\n".join(map(json.dumps, RECORDS)).encode()),
        from_html(HTML.encode()),
        from_mail(f"Subject: {'S' * LONG}\n\n{'word ' * 400}\n".encode()),
        Converted("word " * 400, marks=(Mark(0, "sheet " + "S" * LONG), Mark(900, "sheet " + "Z" * LONG))),
        Converted(CODE, "code"),
    ],
    ids=["records", "lines", "html", "mail", "sheets", "code"],
)
def test_a_chunk_carries_names_within_the_limit(converted: Converted) -> None:
    assert len(converted.title) <= NAME_CHARACTERS
    for chunk in chunks_of(converted):
        assert len(chunk.locator.part) <= NAME_CHARACTERS
        assert max(map(len, chunk.locator.headings), default=0) <= NAME_CHARACTERS
        assert len(chunk.locator.headings) <= 16


def test_long_ids_that_differ_at_the_end_stay_different() -> None:
    parts = {chunk.locator.part for chunk in chunks_of(from_json_records(json.dumps(RECORDS).encode()))}
    assert len(parts) == 2
    assert all(part.startswith("record III") and "\u2026" in part for part in parts)
    assert Mark(0, "page 3").part == "page 3"


def test_a_title_given_with_a_text_is_shortened() -> None:
    document = document_of("a", "the text", "T" * LONG)
    assert len(document.text) < NAME_CHARACTERS + 20
    assert document.text.startswith("# TTT")


def test_records_of_earlier_versions_are_read_and_shown_within_the_limit(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        [name] = put_document(store, "/docs/a.json", "The walrus.\n")
        key, locator = bytes.fromhex(name), Locator("record " + "I" * LONG, (0, 0), ("H" * LONG,) * 99)
        places, settings = (DocumentChunk(key, 0, 0, 12, locator),), {TITLE: "T" * LONG}
        store.put_documents([DocumentRecord("/docs/a.json", "one", "digest", places, 2.0, settings)])
        cited = Citations(store).of(store.get_chunk(key))
    assert len(cited.title) == len(cited.locator.part) == NAME_CHARACTERS
    assert list(map(len, cited.locator.headings)) == [NAME_CHARACTERS] * 16


def test_a_search_hit_is_bounded(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        put_document(store, "/docs/a.md", f"# {'h' * LONG}\n\n", f"walrus {'w' * LONG}\n", *["more\n"] * 9)
        [hit] = search(store, "walrus", Lookup(1)).hits
    assert len(hit.snippet) <= 400
    assert (tmp_path / "store" / "search.sqlite3").stat().st_size < 8 * LONG, "not a heading a chunk"
