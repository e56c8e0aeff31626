"""Excel, through openpyxl: a line a row of each sheet, with the values that formulas had when the file was saved."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.converter import joined, parsing
from cacheblend_cli.corpus.converters.office import opened
from cacheblend_cli.corpus.converters.tables import row_text
from cacheblend_cli.corpus.layout import Converted, Mark


def from_xlsx(data: bytes) -> Converted:
    with parsing("openpyxl", what := "a workbook"):
        from openpyxl import load_workbook

        opened(data, what)
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        parts = [(f"# {s.title}\n\n" + "\n".join(_rows(s)), Mark(0, f"sheet {s.title}")) for s in book.worksheets]
    return joined(parts, "markdown")


def _rows(sheet: Any) -> Iterator[str]:
    names: list[str] | None = None
    for values in sheet.iter_rows(values_only=True):
        row = ["" if value is None else str(value) for value in values]
        if any(cell.strip() for cell in row):
            if names is None:
                names = [" ".join(cell.split()) for cell in row]
                yield ", ".join(filter(None, names))
            else:
                yield row_text(names, row)
