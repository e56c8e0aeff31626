"""Outline of a document: headings in text, definitions in code."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from cacheblend_documents.converted import Kind

_MARKS = re.compile(r"(#{1,6})[ \t]+")
_FENCE = re.compile(r"[ \t]*(```+|~~~+)")
_UNDERLINE = re.compile(r"([=~^*+#\"'`:.\-])\1{2,}[ \t]*")
_DEFINITION = re.compile(
    r"(?:(?:export|default|public|private|protected|internal|static|abstract|final|sealed|async|pub(?:\([^)]*\))?|unsafe|override)\s+)*"
    r"(?:def|class|function|func|fn|fun|struct|enum|trait|impl|interface|module|namespace|object|package|sub)\s+"
    r"(?:\([^)]*\)\s*)?(?:<[^>]*>\s*)?([A-Za-z_$][\w$:.]*)"
)
_TEXT = re.compile(r"\S")
_LINE = re.compile("^", re.MULTILINE)
_SHOWN = 120  # maximum characters of a title
_LOOKED_AT = 400  # characters of a line to parse
_TOGETHER = 1 << 16  # characters of lines to split together
_INDENT_IN = 4096  # characters after the start of a line, in which its indentation is looked for


@dataclass(frozen=True, slots=True)
class _Title:
    """A heading or definition."""

    start: int  # character range start:end of its line
    end: int
    level: int  # depth of a heading, or indentation of a definition
    text: str


class Outline:
    """Titles of a document, in order.

    A definition ends where the code returns to its indentation. A heading's section ends at the next heading of the
    same or a higher level.
    """

    def __init__(self, text: str, kind: Kind) -> None:
        self._text, self._is_code = text, kind == "code"
        find = {"code": _definitions, "rst": _underlined, "markdown": _markdown}.get(kind)
        self._titles = list(find(text)) if find is not None else []
        self._starts = [title.start for title in self._titles]
        self._above = _parents(self._titles)
        self._lines = array("Q", (m.start() for m in _LINE.finditer(text)) if self._is_code else ())  # starts
        before = zip([0, *self._starts], self._starts, strict=False)
        self._blank_from = [begin + len(text[begin:start].rstrip()) for begin, start in before]  # blanks before titles
        self._run_end = self._run_ends()

    @property
    def paths(self) -> Iterator[tuple[str, ...]]:
        """Yield the path of every title, outermost title first, and the empty path."""
        yield ()
        for number in range(len(self._titles)):
            yield tuple(title.text for title in self._chain(number))

    def titles(self, start: int) -> tuple[str, ...]:
        """Return the titles above the text at `start`, outermost first, including headings that begin there."""
        count = bisect_left(self._starts, start)
        if count < len(self._titles) and start >= self._blank_from[count]:
            # in code, the definition that begins here, not the first one inside it
            last = count if self._is_code else self._run_end[count]
            start, count = self._titles[last].end, last + 1
        found = self._chain(count - 1)
        if self._is_code:
            inside = self._indent_at(start)
            found = [title for title in found if title.level < inside or title.end >= start]
        return tuple(title.text for title in found)

    def _indent_at(self, start: int) -> int:
        """Return the indentation of the first non-blank line at or after `start`."""
        begin = self._lines[bisect_right(self._lines, start) - 1]
        for _, line in _lines(self._text[begin : begin + _INDENT_IN]):
            if line.strip():
                return _width(line[: len(line) - len(line.lstrip(" \t"))])
        return 0

    def _run_ends(self) -> list[int]:
        """Return, for each title, the last title of its run: titles with nothing but blanks in between."""
        ends = list(range(len(self._titles)))
        for number in range(len(ends) - 2, -1, -1):
            if self._titles[number].end >= self._blank_from[number + 1]:
                ends[number] = ends[number + 1]
        return ends

    def _chain(self, number: int) -> list[_Title]:
        """Return a title and its parents, outermost first."""
        found = []
        while number >= 0:
            found.append(self._titles[number])
            number = self._above[number]
        return found[::-1]


def heading_spans(text: str, kind: Kind) -> Iterator[tuple[int, int]]:
    """Yield the character range of each heading, with its underline and the blanks after it; none for code."""
    if kind == "code":
        return
    done = 0
    for title in (_underlined if kind == "rst" else _markdown)(text):
        start, stop = title.start, text.find("\n", title.end - 1)
        above = text.rfind("\n", max(start - _LOOKED_AT, 0), max(start - 1, 0)) + 1
        if kind == "rst" and _UNDERLINE.fullmatch(text, above, max(start - 1, above)):
            start = above  # overlined
        found = _TEXT.search(text, stop) if stop >= 0 else None
        start, end = max(start, done), found.start() if found else len(text)
        if start < end:  # lines can end in other characters than \n
            yield start, end
            done = end


def _parents(titles: list[_Title]) -> list[int]:
    """Return the index of each title's parent, -1 for none."""
    found, stack = [], list[int]()
    for number, title in enumerate(titles):
        while stack and titles[stack[-1]].level >= title.level:
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(number)
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (start character, first _LOOKED_AT characters of the line without its line end)."""
    begin = 0
    while begin < len(text):  # splitlines keeps all of its lines
        end = (text.find("\n", begin + _TOGETHER) + 1) or len(text)
        for line in text[begin:end].splitlines(keepends=True):
            yield begin, line[:_LOOKED_AT].rstrip("\n")
            begin += len(line)


def _markdown(text: str) -> Iterator[_Title]:
    """Yield Markdown headings (# and underlined), except in fenced code and front matter."""
    fence, above = "---" if text.startswith("---\n") else "", (0, "")
    for start, line in _lines(text):
        if not start and fence:
            continue
        if fence:
            fence = "" if line.strip().startswith(fence) else fence
            continue
        if found := _FENCE.match(line):
            fence, above = found[1], (start, "")
        elif (found := _MARKS.match(line)) and (title := _without_marks(line[found.end() :])):
            yield _Title(start, start + len(line), len(found[1]), title[:_SHOWN])
            line = ""
        elif above[1] and (found := _UNDERLINE.fullmatch(line)) and found[1] in "=-":
            yield _Title(above[0], start + len(line), "=-".index(found[1]) + 1, above[1][:_SHOWN])
            line = ""
        above = (start, line.strip())


def _without_marks(title: str) -> str:
    """Remove the closing marks of a heading (## Title ##)."""
    return title.rstrip(" \t").rstrip("#").rstrip(" \t")


def _underlined(text: str) -> Iterator[_Title]:
    """Yield reStructuredText headings; levels follow the order in which underline characters first appear."""
    levels: list[str] = []
    above, over = (0, ""), ""
    for start, line in _lines(text):
        found = _UNDERLINE.fullmatch(line)
        if found and above[1] and len(line.rstrip()) >= len(above[1]) and not _UNDERLINE.fullmatch(above[1]):
            style = found[1] + (found[1] if over.startswith(found[1]) else "")
            if style not in levels:
                levels.append(style)
            yield _Title(above[0], start + len(line), levels.index(style), above[1][:_SHOWN])
            above, over = (start, ""), ""
            continue
        over, above = above[1], (start, line.strip())


def _definitions(text: str) -> Iterator[_Title]:
    for start, line in _lines(text):
        body = line.lstrip(" \t")
        if found := _DEFINITION.match(body):
            indent = _width(line[: len(line) - len(body)])
            yield _Title(start, start + len(line), indent, found[1].rstrip(":.")[:_SHOWN])


def _width(blanks: str) -> int:
    return len(blanks.expandtabs(8))
