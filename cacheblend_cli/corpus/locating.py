"""Locators: part, lines and headings of a character range of a document."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right

from cacheblend_store import Locator

from cacheblend_cli.corpus.layout import TextLayout
from cacheblend_cli.corpus.outline import Outline

_NUMBERED = re.compile(r"(\w+) (\d+)")


class Locating:
    """Map character ranges of one document to places in its file."""

    def __init__(self, text: str, layout: TextLayout) -> None:
        self._text, self._layout = text, layout
        self._line_ends = [m.start() for m in re.finditer("\n", text)] if layout.numbered else []
        self._marks = [mark.start for mark in layout.marks]
        self.outline = Outline(text, layout.kind)

    def find(self, start: int, end: int) -> Locator:
        """Return the locator of the characters start:end, ignoring blanks at both ends."""
        body = self._text[start:end]
        first, last = start + len(body) - len(body.lstrip()), start + len(body.rstrip()) - 1
        if last < first:
            first, last = start, max(start, end - 1)
        a, b = (bisect_right(self._marks, at) - 1 for at in (first, last))
        marks = self._layout.marks
        part, lines = "", (0, 0)
        if a >= 0:
            part, lines = _joined(marks[a].part, marks[b].part), (marks[a].line, marks[b].line)
        if self._layout.numbered:
            lines = bisect_left(self._line_ends, first) + 1, bisect_left(self._line_ends, last) + 1
        return Locator(part, lines, self.outline.titles(first))


def _joined(first: str, last: str) -> str:
    """Join part names: "page 3" and "page 5" to "pages 3-5"."""
    if first == last or not (first and last):
        return first or last
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    return f"{a[1]}s {a[2]}-{b[2]}" if a and b and a[1] == b[1] else f"{first} to {last}"
