"""Order of reading of lines with text that runs from right to left.

PDFium guesses it from the order of drawing, and fails where a program draws word by word or letter by letter. What a
reader sees is sure: where the characters stand. So the characters of a line are sorted by place, and then the Unicode
bidirectional algorithm is undone: text from right to left is reversed, without the numbers and the words from left to
right in it.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from cacheblend_documents.pdf.lines import HYPHEN, LINE_ENDS, PIECE_GAP, Box, has_right_to_left

_WORD_GAP = 0.12  # width of the narrowest blank, in heights of the line
_BASELINE = 0.4  # distance of the pen from the baseline of its line, in heights of the line
_SLOPE, _SLOPE_SHARE = 0.1, 0.2  # the same and the share of letters from which on a line is sloping
_CLASSES = {"R": "R", "AL": "R", "L": "L", "EN": "D", "AN": "D", "CS": "S", "ES": "S", "ET": "T"}
"""Bidirectional class -> right, left, digit, separator or sign of numbers. The others are neutral: N."""
_LEFT_RUN = re.compile("(?:D(?:S?D)*)?L(?:[^R]*[LD])?T*|D(?:S?D)*T*")
"""Numbers, and words from left to right, in text that runs from right to left."""
_RIGHT_RUN = re.compile("R(?:[^L]*R)?")
_LINE = re.compile(f"([^{LINE_ENDS}]+)[{LINE_ENDS}]*")
_BRACKETS = dict(zip("([{«)]}»", ")]}»([{«", strict=True))
_LAM, _ALEFS = "\u0644", "\u0622\u0623\u0625\u0627"


@dataclass(slots=True)
class _Sign:
    """A character with the marks above and below it."""

    text: str
    box: Box
    pen: float  # place of the pen before it is drawn, from the left
    baseline: float
    kind: str
    marks: list[tuple[str, Box]] = field(default_factory=list)

    @property
    def is_blank(self) -> bool:
        return self.text.isspace()


def in_reading_order(characters: str, boxes: Sequence[Box], pens: Sequence[Box]) -> tuple[str, list[Box], int]:
    """Return the characters of a page and their boxes with the lines from right to left in the order of reading, and
    the number of letters on sloping lines, which may lack blanks. Wide gaps end a line.

    pens: places of the pen before each character is drawn.
    """
    page_runs_left = runs_left(characters)
    texts, places, num_sloping = list[str](), list[Box](), 0
    for start, end in _lines(characters, boxes, pens):
        line, line_boxes, line_pens = characters[start:end], boxes[start:end], pens[start:end]
        if has_right_to_left(line) and _is_level(line_pens):
            signs = _signs(line, line_boxes, line_pens)
            num_sloping += _num_sloping(signs)
            ordered = [*_line(signs, page_runs_left), ("\n", line_boxes[-1])]
            texts.extend(text for text, _ in ordered)
            places.extend(box for _, box in ordered)
        else:
            texts.append(line)
            places.extend(line_boxes)
    return "".join(texts), places, num_sloping


def runs_left(text: Iterable[str]) -> bool:
    """Return whether most letters are of a script that runs from right to left."""
    kinds = [_kind(character) for character in text]
    return kinds.count("R") > kinds.count("L")


def _kind(character: str) -> str:
    return _CLASSES.get(unicodedata.bidirectional(character), "N")


def _lines(characters: str, boxes: Sequence[Box], pens: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the first and last place of each line. What stands on one baseline can be several lines to PDFium."""
    first = last = 0
    baseline = height = 0.0
    for found in _LINE.finditer(characters):
        shown = slice(*found.span(1))
        pen, high = median(pen[1] for pen in pens[shown]), _height(boxes[shown])
        if last and abs(pen - baseline) > _BASELINE * max(high, height):
            yield first, last
            first = last
        if last == first:
            baseline, height = pen, high
        last = found.end()
    yield first, len(characters)


def _height(boxes: Iterable[Box]) -> float:
    return max(box[3] - box[1] for box in boxes)


def _is_level(pens: Sequence[Box]) -> bool:
    across, along = ([pen[axis] for pen in pens] for axis in (0, 1))
    return len(pens) < 4 or max(along) - min(along) < max(across) - min(across)


def _num_sloping(signs: list[_Sign]) -> int:
    """Return the number of letters of a line if its words go downwards, as in Nastaliq: they overlap, so that nothing
    shows where they end."""
    letters = [sign.baseline for sign in signs if sign.kind == "R" and not sign.marks] or [0.0]
    baseline, most = median(letters), _SLOPE * _height(sign.box for sign in signs)
    is_sloping = sum(abs(letter - baseline) > most for letter in letters) > _SLOPE_SHARE * len(letters)
    return len(letters) if is_sloping else 0


def _signs(line: str, boxes: Sequence[Box], pens: Sequence[Box]) -> list[_Sign]:
    """Return the characters of a line from left to right, without the blanks that PDFium adds."""
    signs, marks = list[_Sign](), list[_Sign]()
    for character, box, pen in zip(line.replace(HYPHEN, "-"), boxes, pens, strict=True):
        sign = _Sign(character, box, round(pen[0], 2), pen[1], _kind(character))
        if unicodedata.bidirectional(character) == "NSM":
            marks.append(sign)
        elif not sign.is_blank or box[2] > box[0]:
            signs.append(sign)
    signs.sort(key=lambda sign: (sign.pen, sign.box[0]))
    for n in range(len(signs) - 1):  # the ligature of lam and alef: alef stands on the left
        if signs[n].pen == signs[n + 1].pen and signs[n].text == _LAM and signs[n + 1].text in _ALEFS:
            signs[n : n + 2] = signs[n + 1], signs[n]
    places = [sign.pen for sign in signs]
    for mark in marks if signs else ():
        middle, at = (mark.box[0] + mark.box[2]) / 2, bisect_left(places, mark.pen)
        near = signs[max(at - 2, 0) : at + 3]
        base = min(near, key=lambda sign: (sign.pen != mark.pen, max(sign.box[0] - middle, middle - sign.box[2])))
        base.marks.append((mark.text, mark.box))
        if base.pen == mark.pen:  # drawn at once: PDFium divides the box of both
            base.box = min(base.box[0], mark.box[0]), base.box[1], max(base.box[2], mark.box[2]), base.box[3]
    return signs


def _line(signs: list[_Sign], page_runs_left: bool) -> Iterator[tuple[str, Box]]:
    """Yield the characters of a line and their boxes."""
    chunks = list(_chunks(signs))
    for n, chunk in enumerate(reversed(chunks) if page_runs_left else chunks):
        if n:
            yield "\n", chunk[0].box
        read = _read(chunk, page_runs_left)
        around = [True, *(sign.is_blank for sign in read), True]
        for at, sign in enumerate(read):
            yield _bracket(sign.text, around[at], around[at + 2] or read[at + 1].kind == "S"), sign.box
            yield from sign.marks


def _bracket(text: str, begins: bool, ends: bool) -> str:
    """Return a bracket as a word begins or ends with it: PDFium mirrors some of them twice."""
    is_wrong = (begins, ends) == (True, False) if text in ")]}»" else (begins, ends) == (False, True)
    return _BRACKETS.get(text, text) if is_wrong else text


def _chunks(signs: list[_Sign]) -> Iterator[list[_Sign]]:
    """Cut a line at wide gaps, and add the blanks that are not drawn."""
    height = _height(sign.box for sign in signs)
    chunk = signs[:1]
    for a, b in pairwise(signs):
        gap = b.pen - a.box[2]
        if gap > PIECE_GAP * height:
            yield chunk
            chunk = []
        elif gap > _WORD_GAP * height and not a.is_blank and not b.is_blank:
            chunk.append(_Sign(" ", (a.box[2], a.box[1], b.pen, a.box[3]), a.box[2], a.baseline, "N"))
        chunk.append(b)
    yield chunk


def _read(chunk: list[_Sign], page_runs_left: bool) -> list[_Sign]:
    """Return a part of a line in the order of reading. It runs as its first and last letter do, or else as the page."""
    kinds = "".join(sign.kind for sign in chunk)
    strong = [kind for kind in kinds if kind in "LR"]
    if strong[0] == "R" if strong and strong[0] == strong[-1] else page_runs_left:
        return _reversed(chunk)
    read, start = list[_Sign](), 0
    for run in _RIGHT_RUN.finditer(kinds):
        read += chunk[start : run.start()] + _reversed(chunk[slice(*run.span())])
        start = run.end()
    return read + chunk[start:]


def _reversed(signs: list[_Sign]) -> list[_Sign]:
    """Return text from right to left in the order of reading."""
    kinds = "".join(sign.kind for sign in signs)
    read, end = list[_Sign](), len(signs)
    for run in reversed(list(_LEFT_RUN.finditer(kinds))):
        read += signs[run.end() : end][::-1] + signs[slice(*run.span())]
        end = run.start()
    return read + signs[:end][::-1]
