"""Tables longer than a chunk: in every chunk, a value has its column name and the key of its row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import books
import mails
import pytest
import slides
import word_files
import workbooks
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document

Rows = Sequence[Sequence[str]]


def tokens(text: str) -> list[int]:
    """A token a word or a mark."""
    return [sum(word.encode()) for word in re.findall(r"\w+|[^\w\s]", text)]


def markdown(rows: Rows) -> str:
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"{first}|{'---|' * len(rows[0])}\n{''.join(others)}"


def page(rows: Rows) -> str:
    lines = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<body><table>{''.join(lines)}</table></body>"


def comma_separated(rows: Rows) -> bytes:
    csv.writer(text := io.StringIO()).writerows(rows)
    return text.getvalue().encode()


def workbook(rows: Rows) -> bytes:
    cell = '<c t="inlineStr"><is><t>{}</t></is></c>'
    return workbooks.workbook({"S": "".join(f"<row>{''.join(map(cell.format, row))}</row>" for row in rows)})


def rich_text(rows: Rows) -> bytes:
    lines = (rf"\trowd\pard\intbl {''.join(f'{cell}' + chr(92) + 'cell ' for cell in row)}\row" for row in rows)
    return ("{\\rtf1 " + "".join(lines) + "}").encode()


def notebook(rows: Rows) -> bytes:
    return json.dumps({"cells": [{"cell_type": "markdown", "source": markdown(rows)}]}).encode()


FORMS: dict[str, Callable[[Rows], bytes]] = {
    "csv": comma_separated,
    "xlsx": workbook,
    "md": lambda rows: markdown(rows).encode(),
    "html": lambda rows: page(rows).encode(),
    "docx": lambda rows: word_files.word(word_files.table(*(word_files.row(*row) for row in rows))),
    "rtf": rich_text,
    "pptx": lambda rows: slides.presentation(slides.Slide([slides.table(*rows)])),
    "eml": lambda rows: mails.mail(mails.part(page(rows), "text/html; charset=utf-8")),
    "epub": lambda rows: books.book({"one.xhtml": books.page(page(rows))}),
    "ipynb": notebook,
}  # fmt: skip


def table(num_rows: int, num_columns: int, more: str = "") -> list[list[str]]:
    """Header and rows: value "v3c2" is in column "name2" of the row with the key "v3c0". more: words of each value."""
    names = [f"name{column}" for column in range(num_columns)]
    return [names, *([f"v{row}c{column} {more}".strip() for column in range(num_columns)] for row in range(num_rows))]


def document(rows: Rows, form: str) -> Document:
    return Document(f"/d/a.{form}", convert_here(f"a.{form}", FORMS[form](rows)))


def check(document: Document, chunks: Sequence[Chunk], most: int) -> None:
    assert [c.start for c in chunks[1:]] == [c.end for c in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].end) == (0, len(document.text))
    for chunk in chunks:
        assert list(chunk.token_ids) == tokens(chunk.text)
        assert len(chunk.token_ids) <= most
        lines = [re.split(r" ?\| ?|, ", line.strip("| ")) for line in chunk.text.split("\n")]
        header = next((cells for cells in lines if cells[0] == "name0"), [])
        for cells in lines:
            keys = re.findall(r"v(\d+)c0\b", " ".join(cells))
            for place, cell in enumerate(cells):
                for row, column in re.findall(r"v(\d+)c(\d+)", cell):
                    assert keys == [row], chunk.text
                    is_named = cell.startswith(f"name{column}: ") or header[place : place + 1] == [f"name{column}"]
                    assert is_named, chunk.text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (table(60, 4), 50),  # rows of 4 columns
        (table(4, 20, "on the bus"), 60),  # rows longer than a chunk
        (table(3, 60), 100),  # names that take more than a quarter of a chunk
        (table(3, 4, "and so on " * 30), 60),  # values longer than a chunk
    ],
    ids=["many rows", "long rows", "wide", "long values"],
)
def test_each_chunk_has_column_names_and_keys(form: str, rows: Rows, most: int) -> None:
    found = document(rows, form)
    chunks = list(cut_document(found, tokens, CutSettings(most)))
    assert len(chunks) > 3
    check(found, chunks, most)
    shown = " ".join(chunk.text for chunk in chunks)
    assert {cell.split()[0] for row in rows for cell in row} <= set(re.findall(r"\w+", shown))


@given(st.data(), st.sampled_from(["csv", "md", "html"]), st.integers(50, 90), st.sampled_from([0, 12]))
def test_blank_cells_stay_blank_and_overlap_keeps_names(
    data: st.DataObject, form: str, most: int, overlap: int
) -> None:
    rows = table(data.draw(st.integers(2, 12)), data.draw(st.integers(3, 9)))
    more = st.sampled_from(["", "", "x", "so it is " * 3, "so it is " * 40])
    for row in rows[2:]:
        row[1:] = [data.draw(st.sampled_from([f"{cell} {data.draw(more)}", ""])) for cell in row[1:]]
    found = document(rows, form)
    if form == "md":
        head = f"# Wards\n\nText above. {data.draw(more)}\n\nThe table has a bar, `|`:\n"
        text = head + found.text + "\nText below. " + data.draw(more) + "\n"
        found = replace(found, converted=replace(found.converted, text=text))
    chunks = list(cut_document(found, tokens, CutSettings(most, overlap)))
    whole = [replace(chunk, start=before.end) for before, chunk in pairwise(chunks)]
    check(found, [*chunks[:1], *whole], most)
    for chunk in chunks:
        assert not re.search(r"name\d+: *(,|\||name|$)", chunk.text), chunk.text


@pytest.mark.parametrize("form", ["md", "html", "csv"])
def test_a_table_that_fits_a_chunk_is_stored_as_it_is(form: str) -> None:
    found = document(table(2, 12), form)
    assert [c.text for c in cut_document(found, tokens, CutSettings(200))] == [found.text]


@pytest.mark.parametrize("form", ["md", "html", "csv"])
def test_names_and_keys_longer_than_a_chunk_are_shortened(form: str) -> None:
    names, *rows = table(3, 4, "long " * 40)
    found = document([[f"{name} {'of a column ' * 4}" for name in names], *rows], form)
    chunks = list(cut_document(found, tokens, CutSettings(48)))
    assert "".join(found.text[chunk.start : chunk.end] for chunk in chunks) == found.text
    assert max(len(chunk.token_ids) for chunk in chunks) <= 48
    parts = [chunk.text for chunk in chunks if chunk.text.rstrip(" |\n").endswith("long")]
    assert len(parts) > 12
    assert all("name" in part and re.search(r"v\dc0", part) for part in parts)


@given(
    st.lists(
        st.sampled_from(["|", "a", " | ", "\n", "-|-\n", "a: b, ", "\n\n", "# H\n", "\\|", "né. ", " ", "y" * 30])
    ),
    st.integers(1, 60),
    st.sampled_from([0, 6]),
    st.sampled_from([None, frozenset[str](), frozenset(("a", "b"))]),
    st.booleans(),
)
def test_nothing_is_lost_and_nothing_is_too_long(
    parts: list[str], most: int, overlap: int, names: frozenset[str] | None, numbered: bool
) -> None:
    text = "".join(parts)
    found = Document("/d/a.md", Converted(text, "markdown", numbered, columns=names))
    end = 0
    for chunk in cut_document(found, lambda text: [ord(c) for c in text], CutSettings(most, min(overlap, most // 2))):
        assert chunk.start <= end < chunk.end
        assert [ord(c) for c in chunk.text] == list(chunk.token_ids)
        assert len(chunk.token_ids) <= most
        end = chunk.end
    assert end == len(text)


def test_a_table_without_names_keeps_its_keys() -> None:
    rows = [[f"key{row}", *(f"{row}.{column} 1 2 3 4" for column in range(20))] for row in range(4)]
    for form in ("csv", "html"):
        chunks = list(cut_document(document(rows, form), tokens, CutSettings(60)))
        assert len(chunks) > 4
        lines = [line for chunk in chunks for line in chunk.text.splitlines()]
        assert all(re.fullmatch(r"key(\d)[,|\s]+(\1\.\d+ 1 2 3 4[,|\s]*)+", line) for line in lines)


def test_lines_of_a_log_are_not_a_table() -> None:
    """In a text file, only a row of dashes shows that a line above is a header."""
    text = "".join(f"web | message {number}\n" for number in range(40))
    chunks = list(cut_document(Document("/d/a.log", Converted(text)), tokens, CutSettings(50)))
    assert "".join(chunk.text for chunk in chunks) == text
