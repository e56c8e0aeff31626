"""Order of the lines of a PDF page.

The order in which the page draws its lines is kept: in most files it is the order of reading. Columns that are drawn
line by line, left and right in turn, are read one after the other. They are found as in the recursive XY cut (Ha,
Haralick and Phillips, 1995): by a vertical gutter that stays free over successive lines, unless the white space between
two of these lines is wider than the gutter.

A table has gutters too, and is read row by row. Columns of text differ by lines that go on: most of them fill their
column, have several words, mostly of letters, and begin with a lower-case letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cacheblend_documents.pdf.lines import PIECE_GAP, Piece, Row
from cacheblend_documents.pdf.right_to_left import runs_left
from cacheblend_documents.pdf.tables import table_lines

_COLUMNS_MAX = 12  # pieces of a row that may be columns; more are a table
_ROWS_MIN = 3  # rows with text on both sides of a gutter
_WORDS_MIN = 3  # mean words of a column's lines
_LETTERS_SHARE = 0.85  # letters of a text; figures and code have fewer
_FILLED = 0.7  # width of a line that fills its column
_FILLED_SHARE = 0.5  # share of lines that fill their column
_GOES_ON_SHARE = 1 / 3  # share of lines that begin with a lower-case letter


def arranged(lines: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of text in the order of reading."""
    run, gutters = list[Row](), list[tuple[float, float]]()
    for row in _rows(lines):
        free = _narrowed(gutters, row)
        if free and _follows(run[-1], row, free):
            run.append(row)
            gutters = free
        else:
            yield from _columns(run, gutters)
            run, gutters = [row], _gutters(row)
    yield from _columns(run, gutters)


def _rows(lines: Iterable[Row]) -> Iterator[Row]:
    """Join successive lines that stand side by side."""
    beside = list[Row]()
    for line in filter(None, lines):
        if beside and not _beside(beside[-1], line):
            yield _joined(beside)
            beside = []
        beside.append(line)
    if beside:
        yield _joined(beside)


def _joined(lines: list[Row]) -> Row:
    if len(lines) > 1 and not _runs_left(piece for line in lines for piece in line):
        lines = sorted(lines, key=lambda line: line[0].left)
    return [piece for line in lines for piece in line]


def _beside(row: Row, line: Row) -> bool:
    a, b = row[-1], line[0]
    if a.is_vertical or b.is_vertical:
        return False
    shared = min(a.top, b.top) - max(a.bottom, b.bottom)
    return shared > 0.6 * min(a.height, b.height) and (b.left >= a.right or line[-1].right <= row[0].left)


def _gutters(row: Row) -> list[tuple[float, float]]:
    places = sorted((piece.left, piece.right) for piece in row)
    return [(a[1], b[0]) for a, b in pairwise(places) if a[1] < b[0]] if len(row) <= _COLUMNS_MAX else []


def _narrowed(gutters: list[tuple[float, float]], row: Row) -> list[tuple[float, float]]:
    """Return the parts of the gutters that the pieces of a row leave free."""
    found, least = [], PIECE_GAP / 2 * row[0].height
    for left, right in gutters:
        for piece in row:
            if piece.left < right and piece.right > left:  # keep the wider rest
                left, right = max((left, piece.left), (piece.right, right), key=lambda rest: rest[1] - rest[0])
        if right - left >= least:
            found.append((left, right))
    return found


def _follows(row: Row, following: Row, gutters: list[tuple[float, float]]) -> bool:
    """Return whether a row is right below another one, or beside it: a cell of a table may be as high as two rows."""
    white = min(piece.bottom for piece in row) - max(piece.top for piece in following)
    return following[0].bottom < row[0].top and white <= max(right - left for left, right in gutters)


def _columns(rows: list[Row], gutters: list[tuple[float, float]]) -> Iterator[str]:
    """Yield the rows, column by column if they are text in columns."""
    cuts = [right for _, right in gutters if _both_sides(rows, right) >= max(_ROWS_MIN, len(rows) / 2)]
    columns = _split(rows, cuts)
    if len(columns) < 2 or not all(map(_goes_on, columns)):
        yield from table_lines(rows)
        return
    if _runs_left(piece for row in rows for piece in row):
        columns.reverse()
    for column in columns:
        yield from (" ".join(piece.text for piece in row) for row in column)


def _both_sides(rows: list[Row], cut: float) -> int:
    return sum(len({piece.left < cut for piece in row}) == 2 for row in rows)


def _split(rows: list[Row], cuts: list[float]) -> list[list[Row]]:
    """Return the rows of each column."""
    columns: list[list[Row]] = [[] for _ in range(len(cuts) + 1)]
    for row in rows:
        parts: list[Row] = [[] for _ in columns]
        for piece in row:
            parts[sum(piece.left >= cut for cut in cuts)].append(piece)
        for column, part in zip(columns, parts, strict=True):
            if part:
                column.append(part)
    return columns


def _goes_on(column: list[Row]) -> bool:
    """Return whether the lines of a column are text that goes on from line to line, unlike the cells of a table."""
    lines = [" ".join(piece.text for piece in row) for row in column]
    widths = [max(piece.right for piece in row) - min(piece.left for piece in row) for row in column]
    filled = sum(width >= _FILLED * max(widths) for width in widths)
    shown = "".join("".join(lines).split())
    if filled < _FILLED_SHARE * len(lines) or sum(map(str.isalpha, shown)) < _LETTERS_SHARE * len(shown):
        return False
    if not any(line[:1].islower() or line[:1].isupper() for line in lines):  # a script without cases
        return sum(map(len, lines)) >= 2 * _WORDS_MIN * len(lines)
    goes_on = sum(line[:1].islower() for line in lines[1:])
    return len(" ".join(lines).split()) >= _WORDS_MIN * len(lines) and goes_on >= _GOES_ON_SHARE * (len(lines) - 1)


def _runs_left(row: Iterable[Piece]) -> bool:
    return runs_left(character for piece in row for character in piece.text[:20])
