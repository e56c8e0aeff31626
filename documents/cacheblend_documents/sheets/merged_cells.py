"""Merged cells of sheets: their text is repeated in each cell that they span."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cacheblend_documents.sheets.tables import Spanned

_MOST_REPEATED = 100  # most repeated cells, as a multiple of the sheet's own
_WIDEST = 64  # columns; a wider merged cell is a title, whose text is not repeated


@dataclass
class MergedCells:
    """Merged cells of a sheet, by their first row. Rows count from 1, columns from 0."""

    _by_row: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, first_row: int, first: int, last_row: int, last: int) -> None:
        """first, last: columns."""
        if first <= last < first + _WIDEST:
            self._by_row.setdefault(first_row, []).append((first, last_row, last))

    def spread(self, rows: Iterable[tuple[int, dict[int, str]]]) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield the filled rows with the texts of merged cells, and up to two rows without cells for those between.

        A row without other cells than one that is merged is a title: its text is not repeated.
        """
        active = dict[int, tuple[int, int, str]]()  # column -> (last row, first column, text) of a merged cell
        last_number, budget = 0, 1000 * _MOST_REPEATED
        for number, cells in rows:
            if not cells:
                continue
            active = {column: merged for column, merged in active.items() if merged[0] >= number}
            for first, last_row, last in self._by_row.get(number, ()):
                if text := cells.get(first):
                    active |= {first: (last_row, first, text)}
                    active |= dict.fromkeys(range(first + 1, last + 1), (last_row, first, Spanned(text)))
            budget += _MOST_REPEATED * len(cells) - len(active)
            if budget < 0:
                active = {}
            if active and len({active[column][1] if column in active else column for column in (*active, *cells)}) > 1:
                repeated = {column: text for column, (_, _, text) in active.items()}
                cells = dict(sorted((cells | repeated).items()))
            for between in range(max(last_number + 1, number - 2), number):
                yield between, {}
            yield number, cells
            last_number = number
