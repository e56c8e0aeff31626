"""Old Excel (.xls), binary Excel (.xlsb) and OpenDocument (.ods) spreadsheets, read with calamine."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.converters.archive import opened
from cacheblend_cli.corpus.converters.converter import joined, parsing
from cacheblend_cli.corpus.converters.omissions import Omissions
from cacheblend_cli.corpus.converters.sheets.merged_cells import MergedCells
from cacheblend_cli.corpus.converters.sheets.number_formats import number_text
from cacheblend_cli.corpus.converters.sheets.tables import numbered_lines
from cacheblend_cli.corpus.layout import Converted, Mark

if TYPE_CHECKING:
    from python_calamine import CalamineSheet


def from_old_sheets(data: bytes) -> Converted:
    """Convert each row of each sheet to one line."""
    with parsing("python-calamine", "a spreadsheet, or with a password"):
        from python_calamine import CalamineError, CalamineWorkbook

        if data.startswith(b"PK"):
            opened(data, "a spreadsheet")
        parts, omissions = list[tuple[str, Mark]](), Omissions()
        book = CalamineWorkbook.from_filelike(io.BytesIO(data))
        for name in book.sheet_names:
            try:
                lines = [line for line, _ in numbered_lines(_rows(book.get_sheet_by_name(name)))]
            except CalamineError:
                omissions.say(f"sheet {name} cannot be read")
                continue
            if lines:
                parts.append((f"# {name}\n\n" + "\n".join(lines), Mark(0, f"sheet {name}")))
    return joined(parts, "markdown", omissions=omissions)


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
