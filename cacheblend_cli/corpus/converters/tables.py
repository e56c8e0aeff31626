"""Tables: one line per row, with column names before the values, so that each row can be understood alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from cacheblend_cli.corpus.converters.converter import NoDocument, decoded
from cacheblend_cli.corpus.layout import Converted, Mark, TextLayout

_LONGEST_CELL = 16 << 20


def from_csv(data: bytes) -> Converted:
    """Convert a table. The delimiter (comma, semicolon, tab or bar) is detected from the first lines."""
    text = decoded(data)
    return _table(text, _delimiter(text))


def from_tsv(data: bytes) -> Converted:
    return _table(decoded(data), "\t")


def _table(text: str, delimiter: str) -> Converted:
    lines, marks, start = list[str](), list[Mark](), 0
    for line, number in _lines(text, delimiter):
        marks.append(Mark(start, line=number))
        lines.append(line)
        start += len(line)
    return Converted("".join(lines), TextLayout("text", numbered=False, marks=tuple(marks)))


def _lines(text: str, delimiter: str) -> Iterator[tuple[str, int]]:
    """Yield (text, line in the file) of each row."""
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=False)
    names: Sequence[str] | None = None
    try:
        begins = 1
        for row in reader:
            if any(cell.strip() for cell in row):
                if names is None:
                    names = [" ".join(cell.split()) for cell in row]
                    yield ", ".join(filter(None, names)) + "\n", begins
                else:
                    yield row_text(names, row) + "\n", begins
            begins = reader.line_num + 1
    except csv.Error as error:
        raise NoDocument(f"not a table: {error} in line {reader.line_num}", "broken tables") from error


def row_text(names: Sequence[str], row: Sequence[str]) -> str:
    """Return "name: Ada, city: Bergen". Values without a column name stand alone; empty ones are left out."""
    cells = [" ".join(cell.split()) for cell in row]
    named = (f"{names[i]}: {cell}" if i < len(names) and names[i] else cell for i, cell in enumerate(cells) if cell)
    return ", ".join(named)


def _delimiter(text: str) -> str:
    try:
        return csv.Sniffer().sniff(text[:4096].rpartition("\n")[0] or text[:4096], ",;\t|").delimiter
    except csv.Error:
        return ","
