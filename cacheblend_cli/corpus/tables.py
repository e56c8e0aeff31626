"""Tables of a text: rows with columns, so that a chunk can repeat what its part of a table lacks.

| rows                                          | chunk of whole rows         | chunk with a part of a row          |
|-----------------------------------------------|-----------------------------|-------------------------------------|
| `Ward 3 | Tue`, of Markdown, HTML, Word, ...  | begins with the header rows | `Ward: Ward 3 | Day: Tue`, with key |
| `Ward: Ward 3, Day: Tue`, of sheets           | as it is                    | as it is, with key                  |

The key of a row is its first cell. If the header rows are too long to repeat, all rows have names before their values.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from cacheblend_documents.converted import NAME_CHARACTERS, Converted
from cacheblend_documents.sheets.tables import cells_of, header_of

# Shares of a chunk that these take at most
_HEADER = 1 / 4
_NAME = 1 / 12  # a column name, and the text of a key
_ALL = 5 / 8
_CHARACTERS = 16  # upper bound of the characters per token of these
_KEPT = 4  # parsed rows and checked texts to keep
_LOOK_AHEAD = 25  # rows that decide on the header of a converted table
_WITH_BAR = r"[^\n|]*+\|[^\n]*+(?:\n|\Z)"
_DELIMITER = r"((?=[^\n]*\|)[ \t|:]*+-[ \t|:-]*+(?:\n|\Z))"  # |---|
_ROWS = rf"(?:{_WITH_BAR}|[^\s#][^\n]*+(?:\n|\Z))++"  # a row with a single cell can be without a bar
_MARKDOWN = re.compile(f"^({_WITH_BAR}){_DELIMITER}{_ROWS}", re.MULTILINE)
_CONVERTED = re.compile(f"^({_WITH_BAR}){_DELIMITER}?+{_ROWS}", re.MULTILINE)
_BAR = re.compile(r"(?<!\\)\|")
_SPACED_BAR = re.compile(r"(?<!\S)\|(?!\S)")


class _Cell(NamedTuple):
    start: int  # character range start:end of its text in the row
    end: int
    name: str  # of its column; "" if unknown


@dataclass(frozen=True)
class _Bars:
    """Rows with bars between the cells."""

    start: int  # of the header rows in the text
    separator: re.Pattern[str]
    header: str  # header rows to repeat; "" if there are none, or they are too long
    names: Mapping[int, str]  # column -> name
    between = " | "

    def cells(self, row: str) -> Iterator[_Cell]:
        """Yield the cells that are not blank."""
        texts = _texts(row, self.separator)
        # a text with a bar looks like two cells, and a wrong name is worse than none
        is_clear = self.separator is _BAR or len(texts) <= max(self.names, default=0) + 1
        for column, (start, text) in enumerate(texts):
            if text:
                yield _Cell(start, start + len(text), self.names.get(column, "") if is_clear else "")


@dataclass(frozen=True)
class _Records:
    """Rows with column names before the values."""

    names: frozenset[str]
    header = ""
    between = ", "

    def cells(self, row: str) -> Iterator[_Cell]:
        begun, known = 0, self._name(row, 0)
        for comma in re.finditer(", ", row):
            name = self._name(row, comma.end())
            if name or not self.names:
                yield _Cell(begun, comma.start(), known)
                begun, known = comma.end(), name
        yield _Cell(begun, len(row), known)

    def _name(self, row: str, start: int) -> str:
        ahead = row[start : start + NAME_CHARACTERS + 2]
        names = (ahead[: colon.start()] for colon in re.finditer(": ", ahead))
        return next(filter(self.names.__contains__, names), "")


class Tables:
    """Rows of the tables of a text, by number."""

    def __init__(
        self, text: str, encode: Callable[[str], Sequence[int]], max_tokens: int, converted: Converted | None = None
    ) -> None:
        """max_tokens: of a chunk. converted: whose part the text is; None for a text without tables."""
        self.source, self._encode, self._max_tokens = text, encode, max_tokens
        self._starts, self._ends = array("Q"), array("Q")  # of rows
        self._tables, self._firsts = list[_Bars | _Records](), list[int]()  # tables, and their first rows
        self._cells = lru_cache(_KEPT)(self._parsed)
        self._is_within, self._shortened = lru_cache(_KEPT)(self._fits), lru_cache(_KEPT)(self._beginning)
        if converted is not None and converted.columns is not None:
            self._add(_Records(converted.columns), 0, len(text))
        elif converted is not None and converted.kind != "code" and "|" in text:
            for found in (_MARKDOWN if converted.keeps_lines else _CONVERTED).finditer(text):
                self._add(*self._with_bars(found), found.end())

    def shown(self, start: int, end: int) -> tuple[str, str]:
        """Return what a chunk of this range repeats, and the text of the range."""
        return self.repeated(start, end), self.text(start, end)

    def repeated(self, start: int, end: int) -> str:
        """Return what to repeat before a range: the header of its whole rows; the key of the row that it starts in."""
        number = bisect_right(self._starts, start) - 1
        if number < 0 or start >= self._ends[number]:
            return ""
        is_part = start > self._starts[number]
        whole, table = number + is_part, self._table(number)
        has_whole = whole < len(self._ends) and self._ends[whole] <= end and self._table(whole) is table
        found = (table.header if has_whole else "") + (self._key(number, start) if is_part else "")
        return found if self._is_within(found, _ALL) else ""

    def text(self, start: int, end: int) -> str:
        """Return the text of a range, with column names in the rows that it cuts."""
        pieces, at = list[str](), start
        for number in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            row, table = (self._starts[number], self._ends[number]), self._table(number)
            part = max(start, row[0]), min(end, row[1])
            if isinstance(table, _Bars) and (part != row or (not table.header and start > table.start)):
                pieces += (self.source[at : part[0]], *self._named(number, *part))
                at = part[1]
        return "".join((*pieces, self.source[at:end]))

    def cell_ends(self, text: str, start: int, end: int) -> Iterator[int]:
        """Yield the ends of the cells in a range within a row, and of the range."""
        number = bisect_right(self._starts, start) - 1
        if number >= 0 and end <= self._ends[number]:
            yield from (cell.start for cell in self._cells(number)[1:] if start < cell.start < end)
        yield end

    def _key(self, number: int, start: int) -> str:
        """Return the first cell of a row, then the name of the cell that a position is in."""
        cells, table = self._cells(number), self._table(number)
        own = bisect_right(cells, start, key=lambda cell: cell.start) - 1
        if own < 0:
            return ""
        name = _label(self._shortened(cells[own].name)) if cells[own].start < start < cells[own].end else ""
        if len(cells) == 1:
            return name
        first = cells[0]
        value = first.start + (len(_label(first.name)) if isinstance(table, _Records) else 0)
        text = self.source[value : min(first.end, value + _CHARACTERS * self._max_tokens)]
        key = _label(self._shortened(first.name)) + self._shortened(text)
        return f"{key}{table.between}{name}" if own else f"{key} "

    def _named(self, number: int, start: int, end: int) -> Iterator[str]:
        """Yield the text of a part of a row, with the names before the cells that start in it."""
        cells, at = self._cells(number), start
        for index in range(bisect_left(cells, start, key=lambda cell: cell.start), len(cells)):
            if cells[index].start >= end:
                break
            yield from (self.source[at : cells[index].start], _label(cells[index].name))
            at = cells[index].start
        yield self.source[at:end]

    def _table(self, number: int) -> _Bars | _Records:
        return self._tables[bisect_right(self._firsts, number) - 1]

    def _parsed(self, number: int) -> list[_Cell]:
        """Return the cells of a row, with starts in the text."""
        row = self._starts[number]
        cells = self._table(number).cells(self.source[row : self._ends[number]])
        return [_Cell(row + start, row + end, name) for start, end, name in cells]

    def _add(self, table: _Bars | _Records, start: int, end: int) -> None:
        self._tables.append(table)
        self._firsts.append(len(self._starts))
        while start < end:
            self._starts.append(start)
            start = (self.source.find("\n", start, end) + 1) or end
            self._ends.append(start)

    def _with_bars(self, found: re.Match[str]) -> tuple[_Bars, int]:
        """Return a table, and the start of the rows below its header."""
        if found[2]:
            names = cells_of([text for _, text in _texts(found[1], _BAR)])
            separator, start = _BAR, found.end(2)
        else:
            lines = found[0].split("\n", _LOOK_AHEAD)[:_LOOK_AHEAD]
            rows = (cells_of([text for _, text in _texts(line, _SPACED_BAR)]) for line in lines)
            names, num_rows = header_of(list(takewhile(bool, rows)))
            separator, start = _SPACED_BAR, found.start() + sum(len(line) + 1 for line in lines[:num_rows])
        header = self.source[found.start() : start]
        header = header if self._is_within(header, _HEADER) else ""
        names = {column: self._beginning(name) for column, name in names.items()}
        return _Bars(found.start(), separator, header, names), start

    def _beginning(self, text: str) -> str:
        """Return the text of a name or key, or as much of it as a chunk has room for."""
        short = shown = text
        while not self._is_within(shown, _NAME):
            short = short[: len(short) // 2]
            shown = short and f"{short}\u2026"
        return shown

    def _fits(self, text: str, share: float) -> bool:
        """Return whether the text takes at most this share of a chunk."""
        most = int(self._max_tokens * share)
        return not text or (len(text) <= _CHARACTERS * most and len(self._encode(text)) <= most)


def _label(name: str) -> str:
    return f"{name}: " if name else ""


def _texts(row: str, separator: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return (start, text) of each cell, also of blank ones. A Markdown row can begin with a bar."""
    bars = [bar.start() for bar in separator.finditer(row)]
    cells = [(start, row[start:end]) for start, end in zip((0, *(b + 1 for b in bars)), (*bars, len(row)), strict=True)]
    texts = [(start + len(cell) - len(cell.lstrip()), cell.strip()) for start, cell in cells]
    return texts[1:] if separator is _BAR and bars and not texts[0][1] else texts
