"""Tables: one line for each row, with column names before the values, so that a row can be read on its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from cacheblend_cli.corpus.converters.converter import NoDocument, decoded
from cacheblend_cli.corpus.layout import Converted, Layout, Mark

_LONGEST_CELL = 16 << 20


def from_csv(data: bytes) -> Converted:
    """The delimiter is found out from the first lines: comma, semicolon, tab or bar."""
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
    return Converted("".join(lines), Layout("text", numbered=False, marks=tuple(marks)))


def _lines(text: str, delimiter: str) -> Iterator[tuple[str, int]]:
    """The rows as text, each with the line of the file it begins in."""
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
    """ "name: Ada, city: Bergen"; a value beyond the named columns stands alone, an empty one is left out."""
    cells = [" ".join(cell.split()) for cell in row]
    named = (f"{names[i]}: {cell}" if i < len(names) and names[i] else cell for i, cell in enumerate(cells) if cell)
    return ", ".join(named)


def _delimiter(text: str) -> str:
    try:
        return csv.Sniffer().sniff(text[:4096].rpartition("\n")[0] or text[:4096], ",;\t|").delimiter
    except csv.Error:
        return ","
