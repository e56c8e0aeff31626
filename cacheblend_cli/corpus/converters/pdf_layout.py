"""Text of a PDF page from its characters and their boxes: words, lines and columns.

PDFium gives the characters in the order in which the page draws them, with its own line ends. That order is kept: in
most files it is the order of reading. Three things are added.

- Words: a gap of a tenth of the character height between two characters is a blank.
- Columns that are drawn line by line, left and right in turn, are read one after the other. They are found as in the
  recursive XY cut (Ha, Haralick and Phillips, 1995): a vertical gutter that stays free over successive lines, unless the
  white space between two of these lines is wider than the gutter.
- Words hyphenated at a line end are joined.

A table has gutters too, and is read row by row. Columns of text differ by lines that go on: most of them fill their
column, have several words, and begin with a lower-case letter.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

WORD_GAP = 0.1  # width of the narrowest blank, in heights of the characters
PIECE_GAP = 1.2  # width of the narrowest gutter
LETTERS_MIN = 8  # letters of a line from which its letter spacing is known
ROWS_MIN = 3  # rows with text on both sides of a gutter
WORDS_MIN = 3  # mean words of a column's lines
FILLED = 0.7  # width of a line that fills its column
FILLED_SHARE = 0.5  # share of lines that fill their column
GOES_ON_SHARE = 1 / 3  # share of lines that begin with a lower-case letter
HYPHEN = "\x02"  # PDFium writes it for a hyphen and the line end after it
LINE_ENDS = "\r\n" + HYPHEN
HYPHENS = "-\u00ad\u2010" + HYPHEN

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


@dataclass(slots=True)
class Piece:
    """Characters of a line without a wide gap."""

    text: str
    left: float
    bottom: float
    right: float
    top: float

    @property
    def height(self) -> float:
        return self.top - self.bottom


Row = list[Piece]
"""Pieces side by side, in the order of reading."""


def turned(boxes: list[Box], degrees: int) -> list[Box]:
    """Return boxes as they are on the screen, where a page may be turned clockwise."""
    match degrees:
        case 90:
            return [(bottom, -right, top, -left) for left, bottom, right, top in boxes]
        case 180:
            return [(-right, -top, -left, -bottom) for left, bottom, right, top in boxes]
        case 270:
            return [(-top, left, -bottom, right) for left, bottom, right, top in boxes]
    return boxes


def lines_of(characters: str, boxes: Sequence[Box]) -> Iterator[Row]:
    """Yield the lines of a page, cut at wide gaps."""
    start = 0
    for index, character in enumerate(characters):
        if character in LINE_ENDS:
            end = index + (character == HYPHEN)
            yield list(_pieces(characters[start:end], boxes[start:end]))
            start = index + 1
    yield list(_pieces(characters[start:], boxes[start:]))


def _pieces(characters: str, boxes: Sequence[Box]) -> Iterator[Piece]:
    """Cut a line at wide gaps, and add the blanks that are not drawn."""
    shown = [n for n, character in enumerate(characters) if not character.isspace()]
    if not shown:
        return
    axis = _axis(boxes[shown[0]], boxes[shown[-1]])
    height = median(_size(boxes[n], 1 - axis) for n in shown)
    gaps = [_gap(boxes[a], boxes[b], axis) for a, b in zip(shown, shown[1:], strict=False)]
    spacing = median(gaps) if len(gaps) >= LETTERS_MIN and sum(gaps) > WORD_GAP / 2 * height * len(gaps) else 0
    blank = WORD_GAP * height + max(0.0, spacing)
    start = shown[0]
    text = [characters[start]]
    for (before, index), gap in zip(zip(shown, shown[1:], strict=False), gaps, strict=True):
        if gap > PIECE_GAP * height > 0 and not axis:
            yield _piece(text, boxes[start : before + 1])
            start, text = index, []
        elif index > before + 1 or (gap > blank > 0 and not (_is_wide(characters[before]) and _is_wide(characters[index]))):
            text.append(" ")
        text.append(characters[index])
    yield _piece(text, boxes[start : shown[-1] + 1])


def _piece(text: list[str], boxes: Sequence[Box]) -> Piece:
    left, bottom, right, top = zip(*boxes, strict=True)
    return Piece("".join(text), min(left), min(bottom), max(right), max(top))


def _axis(first: Box, last: Box) -> int:
    """Return 0 for a horizontal line, 1 for a vertical one."""
    across, along = abs(first[0] - last[0]), abs(first[1] - last[1])
    return int(along > across)


def _size(box: Box, axis: int) -> float:
    return box[axis + 2] - box[axis]


def _gap(a: Box, b: Box, axis: int) -> float:
    """Return the space between two boxes, negative if they overlap. b may be on either side: some scripts run left."""
    return max(b[axis] - a[axis + 2], a[axis] - b[axis + 2])


def _is_wide(character: str) -> bool:
    """Return whether the script is written without blanks."""
    return unicodedata.east_asian_width(character) in "WF"


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
    row: Row = []
    for line in filter(None, lines):
        if row and _beside(row, line):
            row = row + line
            if not _runs_left(row):
                row.sort(key=lambda piece: piece.left)
        else:
            if row:
                yield row
            row = line
    if row:
        yield row


def _beside(row: Row, line: Row) -> bool:
    a, b = row[-1], line[0]
    shared = min(a.top, b.top) - max(a.bottom, b.bottom)
    return shared > 0.6 * min(a.height, b.height) and (b.left >= a.right or line[-1].right <= row[0].left)


def _gutters(row: Row) -> list[tuple[float, float]]:
    places = sorted((piece.left, piece.right) for piece in row)
    return [(a[1], b[0]) for a, b in zip(places, places[1:], strict=False) if a[1] < b[0]]


def _narrowed(gutters: list[tuple[float, float]], row: Row) -> list[tuple[float, float]]:
    """Return what the pieces of a row leave of the gutters."""
    found, least = [], PIECE_GAP / 2 * row[0].height
    for left, right in gutters:
        for piece in row:
            if piece.left < right and piece.right > left:  # keep the wider rest
                left, right = max((left, piece.left), (piece.right, right), key=lambda rest: rest[1] - rest[0])
        if right - left >= least:
            found.append((left, right))
    return found


def _follows(row: Row, following: Row, gutters: list[tuple[float, float]]) -> bool:
    """Return whether a row is right below another one."""
    white = min(piece.bottom for piece in row) - max(piece.top for piece in following)
    return following[0].top < row[0].top and white <= max(right - left for left, right in gutters)


def _columns(rows: list[Row], gutters: list[tuple[float, float]]) -> Iterator[str]:
    """Yield the rows, column by column if they are text in columns."""
    cuts = [right for _, right in gutters if _both_sides(rows, right) >= max(ROWS_MIN, len(rows) / 2)]
    columns = _split(rows, cuts)
    if len(columns) < 2 or not all(map(_goes_on, columns)):
        columns = [rows]
    elif _runs_left(piece for row in rows for piece in row):
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
    left, right = min(row[0].left for row in column), max(row[-1].right for row in column)
    filled = sum(row[-1].right - row[0].left >= FILLED * (right - left) for row in column)
    if filled < FILLED_SHARE * len(lines):
        return False
    if not any(line[:1].islower() or line[:1].isupper() for line in lines):  # a script without cases
        return sum(map(len, lines)) >= 2 * WORDS_MIN * len(lines)
    goes_on = sum(line[:1].islower() for line in lines[1:])
    return len(" ".join(lines).split()) >= WORDS_MIN * len(lines) and goes_on >= GOES_ON_SHARE * (len(lines) - 1)


def _runs_left(row: Iterable[Piece]) -> bool:
    """Return whether most letters are of a script that runs from right to left."""
    kinds = [unicodedata.bidirectional(c) for piece in row for c in piece.text[:20]]
    return sum(kind in ("R", "AL") for kind in kinds) > kinds.count("L")


def dehyphenated(lines: Iterable[str]) -> str:
    """Join lines. A word cut by a hyphen is joined if it goes on with a lower-case letter; soft hyphens are dropped."""
    parts: list[str] = []
    for line in lines:
        line = line.strip()
        if parts and len(parts[-1]) > 1 and parts[-1][-1] in HYPHENS and line[:1].islower() and parts[-1][-2].isalpha():
            parts[-1] = parts[-1][:-1]
        elif parts:
            parts.append("\n")
        parts.append(line)
    return "".join(parts).replace("\u00ad", "").replace(HYPHEN, "-")
