"""Tables: one line per row, with column names before the values, so that each row can be understood alone.

The header row is found below title lines, and empty rows separate tables. A table whose first row looks like the others
has no column names: a wrong name is worse than none.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, pairwise
from typing import Literal

from cacheblend_documents.converted import shortened

Cells = Mapping[int, str]
"""Column -> text of a row, from left to right. Each text is one line; empty cells are left out."""


class Spanned(str):
    """Text of a merged cell, in a column that is not its first."""

    __slots__ = ()


_LOOK_AHEAD = 24  # rows of a table that decide on its header row
_LONGEST_LABEL = 60  # characters of a column name, if nothing but its place shows that it is one
_YEAR = re.compile(r"(?:19|20)\d\d")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_SCIENTIFIC = re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+")
_VALUES = frozenset(("true", "false", "nan", "null", "none", "n/a", "#n/a"))  # words that are not column names


def cells_of(row: Sequence[str]) -> Cells:
    """Return the cells of a row, with blanks and line ends within a cell as one blank."""
    return {column: text for column, cell in enumerate(row) if cell and (text := " ".join(cell.split()))}


def numbered_lines(
    rows: Iterable[tuple[int, Cells]], names: set[str], *, is_file: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield (line, number of its row). A row has a line for each of the tables that are side by side.

    Title lines, header rows and rows without column names are values alone: "name, city". A row without cells separates
    tables: after one such row the column names still hold unless the rows below show their own, after two they do not.

    names: gets the column names.
    is_file: the rows are a file, most likely with one table. A row with one cell is then a record, and the first row
    names a single column.
    """
    table, gap = _Table(), 0
    before: Cells = {}
    for is_empty, group in groupby(rows, key=lambda row: not row[1]):
        if is_empty:
            gap = sum(1 for _ in group)
            continue
        ahead = list(islice(group, _LOOK_AHEAD))
        block = [cells for _, cells in ahead]
        found = _Table.of(block, is_file)
        is_new = found.certain or (found.names and (gap != 1 or found.names.keys() != table.names.keys()))
        if gap == 1 and before and not found.certain and (above := _Table.below(before, block)).names:
            table = above
        elif is_new:
            table = found
        else:
            table = replace(table, first=0) if gap == 1 else _Table()
        names.update(table.names.values())
        for index, (number, cells) in enumerate(chain(ahead, group)):
            for line in table.lines(cells) if index >= table.first else (_line({}, cells),):
                yield line, number
        before, gap = block[-1] if len(block[-1]) > 1 and not table.names else {}, 0


def header_of(rows: Sequence[Cells]) -> tuple[Cells, int]:
    """Return the column names of a table, and the number of rows down to its header; ({}, 0) if it shows none."""
    table = _Table.of(rows) if len(rows) > 1 else _Table()
    return table.names, table.first


@dataclass(frozen=True)
class _Table:
    """Column names of rows. Without names: a table that shows none."""

    names: Cells = field(default_factory=dict)
    starts: Sequence[int] = ()  # first columns of the tables that are right of another one
    first: int = 0  # rows before the first record
    certain: bool = False  # the header row differs from the others in kind
    has_notes: bool = False  # a row with nothing but a text in the first column is a title or a note

    @classmethod
    def of(cls, rows: Sequence[Cells], is_file: bool = False) -> _Table:
        """Find the header row: the first one that fills half of the columns, if it looks unlike the rows below."""
        width = max(map(_num_own, rows))
        if width == 1:
            return cls._one_column(rows, is_file)
        least = max(2, width / 3)
        filled = (
            2 * len(row) >= width and _num_own(row) >= least and _covers(row, rows[n + 1 :])
            for n, row in enumerate(rows)
        )
        first = next((number for number, is_filled in enumerate(filled) if is_filled), len(rows))
        header = rows[first : first + 1]
        below = [row for row in rows[first + 1 :] if row != header[0]]  # without repeated header rows
        if not header or not below:
            return cls()
        names, first = header[0], first + 1
        if len(below) > 1 and _is_upper(names, below[0]):
            both = _combined(names, below[0])
            if _is_header(both, below[1:]):
                names, below, first = both, below[1:], first + 1
        certain = _is_header(names, below)
        if certain is None:
            return cls()
        starts = _starts(names, below)
        has_notes = not is_file and len(names) > 2 and 2 * sum(len(row) == 1 for row in below) < len(below)
        names = {column: shortened(name.rstrip(": ") or name) for column, name in names.items()}
        return cls(names, starts, first, certain, has_notes)

    @classmethod
    def below(cls, header: Cells, rows: Sequence[Cells]) -> _Table:
        """Return the table of rows with a header row above an empty one, if it looks like one."""
        if len(rows) == 1 and len(header) < 3:
            return cls()
        found = cls.of([header, *rows])
        return replace(found, first=0) if found.first == 1 else cls()

    @classmethod
    def _one_column(cls, rows: Sequence[Cells], is_file: bool) -> _Table:
        (column, name), *_ = rows[0].items()
        values = [text for row in rows[1:] for text in row.values()]
        certain = len(values) > 1 and _kind(name) == "text" and all(_kind(value) != "text" for value in values)
        if not values or not (certain or is_file):
            return cls()
        return cls({column: shortened(name)}, (), 1, certain)

    def lines(self, cells: Cells) -> Iterator[str]:
        """Yield the lines of a record."""
        if not self.starts:
            yield self._record(cells)
            return
        for _, part in groupby(cells.items(), key=lambda cell: bisect_right(self.starts, cell[0])):
            yield self._record(dict(part))

    def _record(self, cells: Cells) -> str:
        if self.has_notes and len(cells) == 1:
            ((column, text),) = cells.items()
            if (column == next(iter(self.names)) or column in self.starts) and _kind(text) == "text":
                return text
        is_repeated = len(cells) > 1 and all(self.names.get(column) == text for column, text in cells.items())
        return _line({} if is_repeated else self.names, cells)


def _num_own(cells: Cells) -> int:
    """Return the number of cells, merged ones counted once."""
    return sum(not isinstance(text, Spanned) for text in cells.values())


def _line(names: Cells, cells: Cells) -> str:
    """Return "name: Ada, city: Bergen". Values without a column name stand alone, and merged ones once."""
    cells = {c: text for c, text in cells.items() if not isinstance(text, Spanned) or names.get(c) != names.get(c - 1)}
    named = [f"{names[column]}: {text}" if column in names else text for column, text in cells.items()]
    separators = (" " if text.endswith(":") else ", " for text in named[:-1])
    return "".join(chain.from_iterable(zip(named, (*separators, ""), strict=True)))


def _kind(text: str) -> Literal["text", "number", "year", "date"]:
    if _YEAR.fullmatch(text):
        return "year"
    if _DATE.match(text):
        return "date"
    if not any(map(str.isalpha, text)):
        return "number" if any(map(str.isdigit, text)) else "text"
    return "number" if text.lower() in _VALUES or _SCIENTIFIC.fullmatch(text) else "text"


def _covers(names: Cells, below: Sequence[Cells]) -> bool:
    """Return whether most cells below have a name. A row that begins right of the others leaves out row labels."""
    cells = [column for row in below for column in row]
    return _has_corner(names, below) or 5 * sum(column in names for column in cells) >= 3 * len(cells)


def _has_corner(names: Cells, below: Sequence[Cells]) -> bool:
    """Return whether the rows below begin with labels, which have no column name."""
    return 2 * sum(min(row) < min(names) for row in below) > len(below)


def _is_header(names: Cells, below: Sequence[Cells]) -> bool | None:
    """Return whether a row differs in kind from those below. None: it is like them, so no header row."""
    kinds = {column: _kind(text) for column, text in names.items()}
    if len({*names.values()}) == len(names) and _has_corner(names, below):
        found = [_kind(row[column]) for row in below for column in names if column in row]
        is_numbered = {*kinds.values()} == {"number"} and 2 * found.count("text") > len(found)
        if is_numbered or "number" not in kinds.values():
            return True
    several = {kind for kind, number in Counter(kinds.values()).items() if number > 1}
    labels = sum(kind == "text" or (kind in several and kind != "number") for kind in kinds.values())
    if 2 * labels < len(names) or next(iter(names.values())).endswith(":"):
        return None
    differing = alike = 0
    for column, text in names.items():
        values = [row[column] for row in below if column in row]
        if not values:
            continue
        ((usual, _),) = Counter(map(_kind, values)).most_common(1)
        kind = kinds[column]
        if kind == "text":
            differing += usual != "text"
            alike += usual == "text" and text in values
        else:  # years and dates can be names, of columns of another kind
            is_name = kind in several and kind != "number" and usual != kind
            differing, alike = differing + is_name, alike + (not is_name)
    if differing > alike:
        return True
    is_usual = not alike and labels == len(names) and any(len(row) > 1 for row in below)
    return None if differing or not is_usual or max(map(len, names.values())) > _LONGEST_LABEL else False


def _is_upper(upper: Cells, lower: Cells) -> bool:
    """Return whether a header row can have another one below it: one of its names spans columns."""
    spans = any(left == right and b == a + 1 for (a, left), (b, right) in pairwise(upper.items()))
    return spans and upper != lower and all(_kind(text) in ("text", "year") for text in lower.values())


def _combined(upper: Cells, lower: Cells) -> dict[int, str]:
    columns = sorted({*upper, *lower})
    return {c: " ".join(dict.fromkeys(row[c] for row in (upper, lower) if c in row)) for c in columns}


def _starts(names: Cells, below: Sequence[Cells]) -> list[int]:
    """Return the first columns of further tables, right of empty columns.

    A table has two columns, and text in the first. If only one column is empty, the tables have the same names
    or records in other rows.
    """
    columns, rows = sorted({*names}.union(*below)), [sorted(row) for row in below]
    starts, begin = list[int](), 0
    for index, (left, right) in enumerate(pairwise(columns), 1):
        if right == left + 1 or index - begin < 2 or not {right, right + 1} <= names.keys():
            continue
        are_apart = (
            right > left + 2
            or names[right] == names.get(columns[begin])
            or any((bisect_left(row, columns[begin]) < bisect_left(row, right)) != (row[-1] >= right) for row in rows)
        )
        value = next((row[right] for row in below if right in row), "")
        if value and _kind(value) == "text" and are_apart:
            starts.append(right)
            begin = index
    return starts
