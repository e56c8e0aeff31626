"""Cut a document into chunks, with overlap, heads and locators (part, lines and headings of a character range)."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from cacheblend_documents.converted import Converted
from cacheblend_store import Locator

from cacheblend_cli.corpus.chunker import Chunk, Encode, iter_cut
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.corpus.outline import Outline
from cacheblend_cli.corpus.places import bounded, is_stdin
from cacheblend_cli.corpus.tables import Tables

CUT_VERSION = 5
"""Increase this when the same text and settings give different chunks or locators: documents are then cut again."""
_SENTENCE_ENDS = re.compile(r"[.!?]\s+|\n\s*")
_WORD_ENDS = re.compile(r"\s+")
_CHARACTERS = 16  # upper bound of the characters per overlap token
_HEAD_SHARE = 4  # a head takes at most 1/4 of a chunk
_TITLES = 16  # innermost titles that a head may have
_HEADS = 4096  # heads to remember


@dataclass(frozen=True)
class CutSettings:
    chunk_tokens: int  # maximum tokens of a chunk, including head and overlap
    overlap: int = 0  # maximum tokens repeated from the preceding text
    head: str = ""  # text to put before each chunk, with the placeholder {source}


def cut_document(document: Document, encode: Encode, cut: CutSettings) -> Iterator[Chunk]:
    """Yield the chunks. A chunk's start:end is its range in the document's text, without the head. Head, overlap and
    text are encoded separately, as chunks are in a prompt."""
    locating = Locating(document.converted)
    heads = _Heads(document, locating.outline, encode, cut) if cut.head else None
    room = cut.chunk_tokens - cut.overlap - (heads.most if heads is not None else 0)
    index, shared = 0, dict[int, int]()
    for begin, end in _parts(document):
        tables = Tables(document.text[begin:end], encode, room, document.converted)
        for own in iter_cut(tables.source, encode, room, document.converted.kind, tables):
            start, stop = begin + own.start, begin + own.end
            repeated = _tail(document.text, begin, start, encode, cut.overlap)
            shown = "".join(tables.shown(repeated - begin, own.start))
            if shown != document.text[repeated:start] or tables.repeated(own.start, own.end):
                repeated = start  # the chunk has, or the overlap would need, a part of a table before it
            locator = locating.find(start, stop)
            head = heads.of(locator.headings) if heads is not None else ""
            before = document.text[repeated:start]
            ids = (*(encode(head) if head else ()), *(encode(before) if before else ()), *own.token_ids)
            ids = tuple(map(shared.setdefault, ids, ids))  # one object an id: an int takes four times its place here
            locator = locating.find(repeated, stop) if before else locator
            yield Chunk(index, head + before + own.text, ids, repeated, stop, locator)
            index += 1


def _parts(document: Document) -> Iterator[tuple[int, int]]:
    """Return the character ranges to cut separately: parts of the document that stay apart, else the whole text."""
    starts = [mark.start for mark in document.converted.marks] if document.converted.is_split else [0]
    return zip(starts, (*starts[1:], len(document.text)), strict=True)


def _tail(text: str, begin: int, start: int, encode: Encode, most: int) -> int:
    """Return the start of the overlap: the last whole sentences, else words, before `start`, at most `most` tokens."""
    if not most or start == begin:
        return start
    first = max(begin, start - _CHARACTERS * most)
    window = text[first:start]
    for ends in (_SENTENCE_ENDS, _WORD_ENDS):
        starts = [match.end() for match in ends.finditer(window) if match.end() < len(window)]
        starts = [0, *starts] if first == begin else starts
        fits = bisect_left(starts, True, key=lambda at: len(encode(window[at:])) <= most)  # as all after it
        if fits < len(starts):
            return first + starts[fits]
    return start


class _Heads:
    """Heads of one document's chunks: the document's title and the chunk's headings.

    A head that is too long loses its outer titles, or is left out.
    """

    def __init__(self, document: Document, outline: Outline, encode: Encode, cut: CutSettings) -> None:
        self._form, self._encode = cut.head, encode
        self._room = (cut.chunk_tokens - cut.overlap) // _HEAD_SHARE
        self._title = document.converted.title
        self._name = "stdin" if is_stdin(document.source) else PurePosixPath(document.source).name
        self.of = lru_cache(_HEADS)(self._head)
        self.most = max(len(encode(head)) if (head := self.of(path)) else 0 for path in outline.paths)

    def _head(self, headings: tuple[str, ...]) -> str:
        names = headings if not self._title or self._title in headings[:1] else (self._title, *headings)
        names = tuple(" ".join(name.split()) for name in (names or (self._name,))[-_TITLES:])
        heads = [self._form.replace("{source}", " > ".join(names[outer:])) for outer in range(len(names))]
        fits = bisect_left(heads, True, key=lambda head: len(self._encode(head)) <= self._room)
        return heads[fits] if fits < len(heads) else ""


_NUMBERED = re.compile(r"(\w+) (\d+)")


class Locating:
    """Map character ranges of one document to places in its file."""

    def __init__(self, converted: Converted) -> None:
        self._converted, self._text = converted, converted.text
        ends = (m.start() for m in re.finditer("\n", self._text))
        self._line_ends = array("I", ends if converted.keeps_lines else ())
        self._marks = [mark.start for mark in converted.marks]
        self.outline = Outline(self._text, converted.kind)

    def find(self, start: int, end: int) -> Locator:
        """Return the locator of the characters start:end, ignoring blanks at both ends."""
        body = self._text[start:end]
        first, last = start + len(body) - len(body.lstrip()), start + len(body.rstrip()) - 1
        if last < first:
            first, last = start, max(start, end - 1)
        a, b = (bisect_right(self._marks, at) - 1 for at in (first, last))
        marks = self._converted.marks
        part, lines = "", (0, 0)
        if a >= 0:
            part, lines = _joined(marks[a].part, marks[b].part), (marks[a].line, marks[b].line)
        if self._converted.keeps_lines:
            lines = bisect_left(self._line_ends, first) + 1, bisect_left(self._line_ends, last) + 1
        return bounded(Locator(part, lines, self.outline.titles(first)))


def _joined(first: str, last: str) -> str:
    """Join part names: "page 3" and "page 5" to "pages 3-5"."""
    if first == last or not (first and last):
        return first or last
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    return f"{a[1]}s {a[2]}-{b[2]}" if a and b and a[1] == b[1] else f"{first} to {last}"
