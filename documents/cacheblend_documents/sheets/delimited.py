"""Tables in text files: comma-separated and tab-separated values."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from cacheblend_documents.converted import Converted, Mark, NotConverted
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import decoded
from cacheblend_documents.sheets.tables import Cells, cells_of, numbered_lines

_LONGEST_CELL = 16 << 20
_DELIMITERS = ",;\t|"
_SAMPLE = 1 << 16  # characters that decide on the delimiter
_SAMPLE_ROWS = 100


def from_csv(data: bytes) -> Converted:
    """Convert a table. The delimiter (comma, semicolon, tab or bar) is detected from the first lines."""
    text = decoded(data)
    first, _, rest = text.partition("\n")
    named = first.strip(' "')
    if named.lower().startswith("sep=") and len(named) == 5:  # for spreadsheet programs
        return _table(rest, named[4], 2)
    return _table(text, _delimiter(text), 1)


def from_tsv(data: bytes) -> Converted:
    return _table(decoded(data), "\t", 1)


def _table(text: str, delimiter: str, line: int) -> Converted:
    """line: number of the first line in the file."""
    lines, marks, start, names, omissions = list[str](), list[Mark](), 0, set[str](), Omissions()
    for row, number in numbered_lines(_rows(text, delimiter, line, omissions), names, is_file=True):
        marks.append(Mark(start, line=number))
        lines.append(row + "\n")
        start += len(row) + 1
    return Converted(
        "".join(lines), keeps_lines=False, marks=tuple(marks), columns=frozenset(names), omissions=tuple(omissions)
    )


def _rows(text: str, delimiter: str, line: int, omissions: Omissions) -> Iterator[tuple[int, Cells]]:
    """Yield (line in the file, cells). line: number of the first line."""
    csv.field_size_limit(_LONGEST_CELL)
    reader, begin = csv.reader(io.StringIO(text), delimiter=delimiter, strict=False), line
    try:
        for row in reader:
            yield begin, cells_of(row)
            begin = line + reader.line_num
    except csv.Error as error:
        if begin == line:
            raise NotConverted(f"not a table: {error} in line {line}", "broken tables") from error
        omissions.say(f"the rows from line {begin} cannot be read: {error}")


def _delimiter(text: str) -> str:
    """Return the delimiter with which most of the first rows have the same number of columns."""
    sample = text[:_SAMPLE]
    if len(sample) < len(text):
        sample = sample.rpartition("\n")[0] or sample
    return max(_DELIMITERS, key=lambda delimiter: _consistency(sample, delimiter))


def _consistency(sample: str, delimiter: str) -> tuple[int, int]:
    """Return (rows with the most common number of columns above one, that number)."""
    rows = islice(csv.reader(io.StringIO(sample), delimiter=delimiter), _SAMPLE_ROWS)
    widths = Counter(len(row) for row in rows if len(row) > 1)
    return max(((rows, width) for width, rows in widths.items()), default=(0, 0))
