"""Old Excel (.xls), binary Excel (.xlsb) and OpenDocument (.ods) spreadsheets, read with calamine.

Web applications also export pages and tab-separated text under the name of an Excel file.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING

from cacheblend_documents.archive import opened
from cacheblend_documents.converter import COMPOUND, joined, parsing
from cacheblend_documents.layout import Converted, Mark
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.sheets.delimited import from_tsv
from cacheblend_documents.sheets.merged_cells import MergedCells
from cacheblend_documents.sheets.number_formats import number_text
from cacheblend_documents.sheets.tables import numbered_lines
from cacheblend_documents.sheets.xlsb import with_floats
from cacheblend_documents.web.html import from_html

if TYPE_CHECKING:
    from python_calamine import CalamineSheet


_START = 1024  # bytes that tell pages and text from spreadsheets
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def from_old_sheets(data: bytes) -> Converted:
    """Convert each row of each sheet to one line."""
    if not data.startswith((b"PK", COMPOUND)):
        start = data[:_START].lower()
        if b"<html" in start or b"<table" in start:
            return from_html(data)
        if b"\t" in start and (b"\0" not in start or start.startswith(_BYTE_ORDER_MARKS)):
            return from_tsv(data)
    with parsing("python-calamine", "a spreadsheet, or with a password"):
        from python_calamine import CalamineError, CalamineWorkbook

        if data.startswith(b"PK"):
            opened(data, "a spreadsheet")
        parts, names, omissions = list[tuple[str, Mark]](), set[str](), Omissions()
        with _without_panics():
            book = CalamineWorkbook.from_filelike(io.BytesIO(with_floats(data)))
        for name in book.sheet_names:
            try:
                with _without_panics():
                    lines = [line for line, _ in numbered_lines(_rows(book.get_sheet_by_name(name)), names)]
            except CalamineError:
                omissions.say(f"sheet {name} cannot be read")
                continue
            if lines:
                parts.append((f"# {name}\n\n" + "\n".join(lines), Mark(0, f"sheet {name}")))
    return joined(parts, "markdown", names=frozenset(names), omissions=omissions)


@contextmanager
def _without_panics() -> Iterator[None]:
    """Convert a panic of the library, which is not an Exception, to its error for damaged files."""
    from python_calamine import CalamineError

    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CalamineError from error


def _rows(sheet: CalamineSheet) -> Iterator[tuple[int, dict[int, str]]]:
    merged = MergedCells()
    for (row, column), (last_row, last_column) in sheet.merged_cell_ranges or ():
        merged.add(row + 1, column, last_row + 1, last_column)
    return merged.spread(
        (number, {column: text for column, value in enumerate(row) if value != "" and (text := _text(value))})
        for number, row in enumerate(sheet.iter_rows(), 1)
    )


def _text(value: str | bool | float | date | time | timedelta) -> str:
    """Return the text of a cell: dates and times in ISO 8601, without a time of 00:00."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds").removesuffix(":00").removesuffix(" 00:00")
    if isinstance(value, time):
        return value.isoformat("seconds").removesuffix(":00")
    return " ".join(str(value).split())
