"""Old Excel (.xls), binary Excel (.xlsb) and OpenDocument (.ods) spreadsheets, read with calamine.

Web applications also export pages and tab-separated text under the name of an Excel file.
"""

from __future__ import annotations

import codecs
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING

from cacheblend_documents.converted import Converted, Mark, joined
from cacheblend_documents.number_formats import number_text
from cacheblend_documents.office.package import opened
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import COMPOUND
from cacheblend_documents.sheets.delimited import from_tsv
from cacheblend_documents.sheets.merged_cells import MergedCells
from cacheblend_documents.sheets.tables import numbered_lines
from cacheblend_documents.web.html import from_html

if TYPE_CHECKING:
    from python_calamine import CalamineSheet


_START = 1024  # bytes that tell pages and text from spreadsheets
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CELL_RK = 2  # kind of record: a cell with a number of four bytes
_VALUE = 8  # start of the number, after the column and the style
_SIZE = 12


def from_old_sheets(data: bytes) -> Converted:
    """Convert each row of each sheet to one line."""
    if not data.startswith((b"PK", COMPOUND)):
        start = data[:_START].lower()
        if b"<html" in start or b"<table" in start:
            return from_html(data)
        if b"\t" in start and (b"\0" not in start or start.startswith(_BYTE_ORDER_MARKS)):
            return from_tsv(data)
    from python_calamine import CalamineError, CalamineWorkbook

    if data.startswith(b"PK"):
        opened(data, "a spreadsheet")
    parts, names, omissions = list[tuple[str, Mark]](), set[str](), Omissions()
    with _without_panics():
        book = CalamineWorkbook.from_filelike(io.BytesIO(_with_floats(data)))
    for name in book.sheet_names:
        try:
            with _without_panics():
                lines = [line for line, _ in numbered_lines(_rows(book.get_sheet_by_name(name)), names)]
        except CalamineError:
            omissions.say(f"sheet {name} cannot be read")
            continue
        if lines:
            parts.append((f"# {name}\n\n" + "\n".join(lines), Mark(0, f"sheet {name}")))
    return joined(parts, "markdown", columns=frozenset(names), omissions=omissions)


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


def _with_floats(data: bytes) -> bytes:
    """Return a binary workbook with whole numbers as floating-point numbers, where they fit, and other files unchanged.

    Of the numbers that a cell can hold (MS-XLSB 2.5.123), calamine takes whole numbers for numbers even if the cell's
    format is that of a date. As floating-point numbers of the same four bytes, they are dates. Parts that cannot be
    unpacked are left out.
    """
    if not data.startswith(b"PK"):
        return data
    archive, out = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    if "xl/workbook.bin" not in archive.namelist():
        return data
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as changed:
        for name in filter(lambda name: name.endswith((".bin", ".rels")), archive.namelist()):
            with suppress(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError):
                part = archive.read(name)
                changed.writestr(name, _sheet_with_floats(part) if name.startswith("xl/worksheets/") else part)
    return out.getvalue()


def _sheet_with_floats(data: bytes) -> bytes:
    changed, at = bytearray(data), 0
    while at < len(data):
        kind, at = _number(data, at, 2)
        size, at = _number(data, at, 4)
        value = at + _VALUE
        if kind == _CELL_RK and size >= _SIZE and value + 4 <= len(data) and data[value] & 3 == 2:  # whole, not / 100
            number = int.from_bytes(data[value : value + 4], "little", signed=True) >> 2
            low, high = struct.unpack("<II", struct.pack("<d", number))
            if not low and not high & 3:
                changed[value : value + 4] = high.to_bytes(4, "little")
        at += size
    return bytes(changed)


def _number(data: bytes, at: int, most: int) -> tuple[int, int]:
    """Return a number of up to `most` bytes with 7 bits each, and the place after it."""
    number = 0
    for shift in range(0, 7 * most, 7):
        byte = data[at] if at < len(data) else 0
        number, at = number | (byte & 0x7F) << shift, at + 1
        if not byte & 0x80:
            break
    return number, at
