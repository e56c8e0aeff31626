"""Workbooks, read with openpyxl."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.archive import opened
from cacheblend_cli.corpus.converters.converter import NoDocument, joined, parsing
from cacheblend_cli.corpus.converters.tables import row_text
from cacheblend_cli.corpus.layout import Converted, Mark

_MOST_ROWS = 1 << 20  # maximum rows of a sheet


def from_xlsx(data: bytes) -> Converted:
    """Convert each row of each sheet to one line. Formulas have the values that were saved with the file."""
    with parsing("openpyxl", what := "a workbook"):
        from openpyxl import load_workbook

        opened(data, what)
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        parts = [(f"# {s.title}\n\n" + "\n".join(_rows(s)), Mark(0, f"sheet {s.title}")) for s in book.worksheets]
    return joined(parts, "markdown")


def _rows(sheet: Any) -> Iterator[str]:
    names: list[str] | None = None
    for number, values in enumerate(sheet.iter_rows(values_only=True), 1):
        if number > _MOST_ROWS:  # the count includes rows missing in the file
            raise NoDocument(f"a sheet has more than {_MOST_ROWS:,} rows", "damaged or locked")
        row = ["" if value is None else str(value) for value in values]
        if any(cell.strip() for cell in row):
            if names is None:
                names = [" ".join(cell.split()) for cell in row]
                yield ", ".join(filter(None, names))
            else:
                yield row_text(names, row)
