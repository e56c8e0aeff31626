"""Where a chunk is in its file: lines, parts, headings, the definitions of code."""

from __future__ import annotations

import json
import re
from base64 import b64encode

import pytest
from cacheblend_documents.converted import Converted, Mark
from cacheblend_store import DocumentChunk, DocumentRecord, Locator
from cacheblend_store.errors import BadBlob
from cacheblend_store.format.records import decode_document, document_key, encode_document, seal
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.corpus.cutting import Locating
from cacheblend_cli.corpus.outline import Outline

MARKDOWN = """---
title: no heading
---
# Travel

Before anything.

## Refunds ##

```sh
# no heading
```

Within two weeks.

Sub-title
---------

More.

# Pets

None.
"""


def at(found: Converted, first: str, last: str = "") -> Locator:
    text = found.text
    start = text.index(first)
    return Locating(found).find(start, text.index(last or first) + len(last or first))


@pytest.mark.parametrize(
    ("first", "lines", "headings"),
    [
        ("Before", (6, 6), ("Travel",)),
        ("# Travel", (4, 4), ("Travel",)),
        ("## Refunds ##\n\n", (8, 8), ("Travel", "Refunds")),
        ("# no heading", (11, 11), ("Travel", "Refunds")),
        ("Within", (14, 14), ("Travel", "Refunds")),
        ("More", (19, 19), ("Travel", "Sub-title")),
        ("None", (23, 23), ("Pets",)),
    ],
)
def test_markdown_has_lines_and_headings(first: str, lines: tuple[int, int], headings: tuple[str, ...]) -> None:
    assert at(Converted(MARKDOWN, "markdown"), first) == Locator("", lines, headings)


def test_a_run_of_lines_ends_where_its_text_ends() -> None:
    found = at(Converted(MARKDOWN, "markdown"), "\nBefore", "weeks.\n\n")
    assert found.lines == (6, 14)
    assert found.text == "lines 6-14"


def test_restructured_text_has_levels_in_order_of_their_underlines() -> None:
    text = "=====\nTitle\n=====\n\nOne\n---\n\na\n\nTwo\n~~~\n\nb\n\nThree\n-----\n\nc\n"
    assert [at(Converted(text, "rst"), x + "\n").headings for x in ("a", "b", "c")] == [
        ("Title", "One"),
        ("Title", "One", "Two"),
        ("Title", "Three"),
    ]


PYTHON = '''import os

class Pool:
    """Blocks."""

    async def take(self):
        return 1

LIMIT = 3

def free(x):
    return x
'''
GO = "package kv\n\nfunc (p *Pool) Take() int {\n\treturn 1\n}\n\ntype T struct {\n}\n"


@pytest.mark.parametrize(
    ("text", "first", "headings"),
    [
        (PYTHON, "import os", ()),
        (PYTHON, "class Pool", ("Pool",)),
        (PYTHON, "    async def", ("Pool", "take")),
        (PYTHON, "        return 1", ("Pool", "take")),
        (PYTHON, "LIMIT", ()),
        (PYTHON, "def free", ("free",)),
        (PYTHON, "    return x", ("free",)),
        (GO, "\treturn 1", ("Take",)),
    ],
)
def test_code_has_its_definitions(text: str, first: str, headings: tuple[str, ...]) -> None:
    assert at(Converted(text, "code"), first).headings == headings


def test_converted_files_have_parts() -> None:
    text = "one\n\ntwo\n\nthree\n"
    pages = Converted(text, keeps_lines=False, marks=(Mark(0, "page 1"), Mark(5, "page 2"), Mark(10, "page 3")))
    assert at(pages, "two").text == "page 2"
    assert at(pages, "one", "two").text == "pages 1-2"
    assert at(pages, "one\n\n").text == "page 1"
    rows = Converted(text, keeps_lines=False, marks=(Mark(0, line=2), Mark(5, line=3), Mark(10, line=7)))
    assert at(rows, "two", "three").text == "lines 3-7"
    sheets = Converted(text, keeps_lines=False, marks=(Mark(0, "sheet A"), Mark(5, "sheet B")))
    assert at(sheets, "one", "three").text == "sheet A to sheet B"


def test_a_long_line_is_no_trouble() -> None:
    text = "# " + " " * 300_000 + "#x\n" + "def " * 100_000
    assert at(Converted(text, "markdown"), "def").lines == (2, 2)
    assert at(Converted(text, "code"), "def").lines == (2, 2)


def test_chunks_of_headings_and_blanks_have_the_heading_after_them() -> None:
    headings = Outline("# a\n" * 1000, "markdown")
    assert {headings.titles(start) for start in range(0, 4000, 40)} == {("a",)}
    blanks = Outline("x\n" + " " * 100_000 + "\n# a\n", "markdown")
    assert {blanks.titles(start) for start in range(10, 100_000, 100)} == {("a",)}
    assert blanks.titles(0) == ()


@given(st.text(alphabet=" \t#ab", max_size=24))
def test_a_heading_is_its_line_without_marks(rest: str) -> None:
    found = re.fullmatch(r"(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*", "#" + rest)
    titles = [title for path in Outline(f"#{rest}\n", "markdown").paths for title in path]
    assert titles == ([found[2]] if found and found[2] else [])


def test_all_of_a_long_line_is_in_its_definition() -> None:
    code = Outline("def f():\n    " + "x; " * 30_000, "code")
    assert {code.titles(start) for start in range(20, 90_000, 100)} == {("f",)}


def test_locators_are_stored_and_checked() -> None:
    key, own = document_key("c", "a.md"), b"k" * 20
    chunks = (DocumentChunk(own, 0, 0, 5, Locator("page 3", (0, 0), ("Ä", "B"))), DocumentChunk(own, 1, 5, 9))
    record = DocumentRecord("a.md", "c", "d", chunks, 1.0)
    assert decode_document(key, encode_document(record)) == record
    fields = {"source": "a.md", "collection": "c", "content_digest": "d", "updated": 1.0}

    def read(*locator: object) -> tuple[DocumentChunk, ...]:
        place = [b64encode(own).decode(), 1, 5, 9, *locator]
        return decode_document(key, seal(key, json.dumps({**fields, "chunks": [place]}).encode())).chunks

    assert read() == chunks[1:]
    assert read(["page 3", [0, 0], ["Ä", "B"]])[0].locator == chunks[0].locator
    for bad in (["page", 1], [3, [1, 2], []], ["", [1, 2, 3], []], ["", [1, 2], [], 1]):
        with pytest.raises(BadBlob):
            read(bad)
