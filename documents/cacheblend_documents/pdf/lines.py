"""Lines of a PDF page: its characters, cut at wide gaps, with the blanks that are not drawn.

PDFium gives the characters in the order in which the page draws them, with its own line ends and blanks. A gap of a
tenth of the character height is a blank too, beyond the letter spacing of the line.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_WORD_GAP = 0.1  # width of the narrowest blank, in heights of the characters
PIECE_GAP = 1.2  # width of the narrowest gutter
_LETTERS_MIN = 8  # letters of a line from which its letter spacing is known
_SPACING = 0.05, 0.4  # letter spacing, in heights; less is kerning, and more is single letters
HYPHEN = "\x02"  # PDFium writes it for a hyphen and the line end after it
LINE_ENDS = "\r\n" + HYPHEN

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
    is_vertical: bool = False

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
    pairs = list(pairwise(shown))
    gaps = [_gap(boxes[a], boxes[b], axis) for a, b in pairs]
    spacing = _spacing(characters, boxes, shown, height)
    blank = _WORD_GAP * height + spacing
    start = shown[0]
    text = [characters[start]]
    has_blanks = has_right_to_left(characters)  # see `right_to_left`
    for (before, index), gap in zip(pairs, gaps, strict=True):
        is_apart = not has_blanks and _may_be_apart(characters[before], characters[index])
        if gap > PIECE_GAP * height > 0 and not axis and is_apart:
            yield _piece(text, boxes[start : before + 1], axis)
            start, text = index, []
        elif any(not spacing or _size(box, axis) > 0 for box in boxes[before + 1 : index]) or (
            gap > blank > 0 and is_apart
        ):
            text.append(" ")
        text.append(characters[index])
    yield _piece(text, boxes[start : shown[-1] + 1], axis)


def _spacing(characters: str, boxes: Sequence[Box], shown: Sequence[int], height: float) -> float:
    """Return the letter spacing of a line, 0 if there is none or the line is not level.

    In spaced letters the blanks that PDFium adds, which have no width, are not the ends of words.
    """
    gaps = [
        _gap(boxes[a], boxes[b], 0) for a, b in pairwise(shown) if characters[a].isalnum() and characters[b].isalnum()
    ]
    if len(gaps) < _LETTERS_MIN or abs(boxes[shown[0]][1] - boxes[shown[-1]][1]) > height / 2:
        return 0
    spacing = median(gaps)
    return spacing if _SPACING[0] * height < spacing < _SPACING[1] * height else 0


def _piece(text: list[str], boxes: Sequence[Box], axis: int) -> Piece:
    left, bottom, right, top = zip(*boxes, strict=True)
    return Piece("".join(text), min(left), min(bottom), max(right), max(top), bool(axis))


def _axis(first: Box, last: Box) -> int:
    """Return 0 for a horizontal line, 1 for a vertical one."""
    across, along = abs(first[0] - last[0]), abs(first[1] - last[1])
    return int(along > across)


def _size(box: Box, axis: int) -> float:
    return box[axis + 2] - box[axis]


def _gap(a: Box, b: Box, axis: int) -> float:
    """Return the space between two boxes, negative if they overlap. b may be on either side."""
    return max(b[axis] - a[axis + 2], a[axis] - b[axis + 2])


def _may_be_apart(a: str, b: str) -> bool:
    """Return whether a gap between two characters is one between words: not in scripts without blanks."""
    return a < "\u0590" or b < "\u0590" or not all(unicodedata.east_asian_width(c) in "WF" for c in (a, b))


def has_right_to_left(text: str) -> bool:
    return any(c >= "\u0590" and unicodedata.bidirectional(c) in ("R", "AL") for c in text)
