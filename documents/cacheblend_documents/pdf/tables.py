"""Tables of a PDF page with blank cells: the places of its columns tell to which one a value belongs.

The rows of such a table are written with bars between the cells: `Receivables |  | 310`. Other rows are written as they
are. Strong evidence is needed for a table: three columns that stay apart, two of them of numbers with a common edge, or
all with a common edge and two rows without blanks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cacheblend_documents.pdf.lines import Piece, Row
from cacheblend_documents.pdf.right_to_left import runs_left

_ROWS_MAX = 500  # of a table; more begin another one
_COLUMNS_MIN, _COLUMNS_MAX = 3, 50
_NUMBERS_MIN = 2  # columns of numbers
_NUMBERS_SHARE = 0.6  # cells of such a column that are numbers, and numbers with a common edge
_ALIGNED_SHARE = 0.8  # cells of any other column with a common edge
_ALIGNED_MIN = 3  # cells with a common edge
_FILLED_MIN = 2  # rows without blanks, if there are no columns of numbers
_SAME = 0.3  # distance of equal edges, in heights of a cell
_NUMBER = re.compile(r"\W{0,3}\d")


@dataclass(slots=True, eq=False)
class _Column:
    left: float
    right: float
    cells: dict[int, Piece] = field(default_factory=dict)  # by row

    def has(self, piece: Piece) -> bool:
        return piece.left < self.right and piece.right > self.left

    def add(self, row: int, piece: Piece) -> None:
        self.left, self.right = min(self.left, piece.left), max(self.right, piece.right)
        self.cells[row] = piece

    def is_aligned(self) -> bool:
        return _are_aligned(list(self.cells.values()), _ALIGNED_SHARE)

    def is_of_numbers(self) -> bool:
        numbers = [cell for cell in self.cells.values() if _NUMBER.match(cell.text)]
        return len(numbers) >= _NUMBERS_SHARE * len(self.cells) and _are_aligned(numbers, _NUMBERS_SHARE)


def _are_aligned(cells: Sequence[Piece], share: float) -> bool:
    """Return whether this share of the cells has a common edge or middle."""
    if len(cells) < _ALIGNED_MIN:
        return False
    places = zip(*((cell.left, (cell.left + cell.right) / 2, cell.right) for cell in cells), strict=True)
    least = max(_ALIGNED_MIN, share * len(cells))
    return any(_most_equal(edges, _SAME * cells[0].height) >= least for edges in places)


def _most_equal(places: Iterable[float], distance: float) -> int:
    """Return the largest number of places that differ by this distance at most."""
    ordered = sorted(places)
    return max(bisect_right(ordered, place + distance) - n for n, place in enumerate(ordered))


@dataclass(slots=True)
class _Block:
    """Successive rows whose pieces stand in columns. A row of one piece may stand over several."""

    rows: list[Row] = field(default_factory=list)
    columns: list[_Column] = field(default_factory=list)

    def add(self, row: Row) -> bool:
        """Add a row, unless it does not fit the columns."""
        if len(self.rows) >= _ROWS_MAX or len(self.columns) > _COLUMNS_MAX:
            return False
        if 1 < len(row) <= _COLUMNS_MAX:
            found = [[column for column in self.columns if column.has(piece)] for piece in row]
            known = [columns[0] for columns in found if columns]
            if any(len(columns) > 1 for columns in found) or len(set(known)) < len(known):
                return False
            for piece, columns in zip(row, found, strict=True):
                if not columns:
                    columns.append(_Column(piece.left, piece.right))
                    self.columns += columns
                columns[0].add(len(self.rows), piece)
        self.rows.append(row)
        return True

    def lines(self) -> Iterator[str]:
        self._join_columns()
        columns = sorted(self.columns, key=lambda column: column.left)
        if runs_left(character for row in self.rows for piece in row for character in piece.text[:20]):
            columns.reverse()
        grid = [_cells(row, columns) for row in self.rows]
        has_blanks = any(cells[0] and not all(cells) for cells in grid if any(cells[1:]))
        is_table = has_blanks and self._is_table()
        for row, cells in zip(self.rows, grid, strict=True):
            if is_table and any(cells[1:]):
                yield " | ".join(cells)
            else:
                yield " ".join(piece.text for piece in row)

    def _join_columns(self) -> None:
        """Join columns of which no row has two and over which a piece stands: their cells are aligned differently."""
        for row in self.rows:
            under = [column for column in self.columns if column.has(row[0])] if len(row) == 1 else []
            cells = {number: cell for column in under for number, cell in column.cells.items()}
            if len(under) > 1 and len(cells) == sum(len(column.cells) for column in under):
                joined = _Column(min(column.left for column in under), max(column.right for column in under), cells)
                self.columns = [column for column in self.columns if column not in under] + [joined]

    def _is_table(self) -> bool:
        if len(self.columns) < _COLUMNS_MIN or any(len(column.cells) < 2 for column in self.columns):
            return False
        if sum(column.is_of_numbers() for column in self.columns) >= _NUMBERS_MIN:
            return True
        filled = set.intersection(*(set(column.cells) for column in self.columns))
        return len(filled) >= _FILLED_MIN and all(column.is_aligned() for column in self.columns)


def _cells(row: Row, columns: Sequence[_Column]) -> list[str]:
    """Return the text of a row in each column; nothing if a piece stands over several."""
    found = [[piece.text for piece in row if column.has(piece)] for column in columns]
    return [" ".join(texts) for texts in found] if sum(map(len, found)) == len(row) else []


def table_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield successive rows of a page as lines of text."""
    block = _Block()
    for row in rows:
        if not block.add(row):
            yield from block.lines()
            block = _Block()
            block.add(row)
    yield from block.lines()
