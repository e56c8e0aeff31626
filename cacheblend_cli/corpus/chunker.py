"""Cut documents into chunks, losslessly: at paragraphs, else lines, sentences, words, characters."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from cacheblend_documents.converted import Kind
from cacheblend_store import NOWHERE, Locator

from cacheblend_cli.corpus.outline import heading_spans
from cacheblend_cli.corpus.tables import Tables

Encode = Callable[[str], list[int]]
_Level = Callable[[str, int, int], Iterator[int]]
"""Yields the ends of the pieces of text[start:end]; the last one is `end`. Takes linear time."""


def _after(
    separator: re.Pattern[str], text: str, start: int, end: int, follows: re.Pattern[str] | None = None
) -> Iterator[int]:
    """Yield the ends of separators, and of the text. follows: pattern that must match after a separator."""
    stop = start
    for match in separator.finditer(text, start, end):
        if follows is None or follows.match(text, match.end(), end):
            yield (stop := match.end())
    if stop < end:
        yield end


def _characters(text: str, start: int, end: int) -> Iterator[int]:
    return iter(range(start + 1, end + 1))


_PARAGRAPHS = partial(_after, re.compile(r"\n[ \t]*\n\s*"))  # with the blank lines after them
_LINES = partial(_after, re.compile(r"\n"))
_SENTENCES = partial(_after, re.compile(r"[.!?]\s+"))
_WORDS = partial(_after, re.compile(r"\S\s+"))
# Blank lines are matched as a whole, and only then what follows is looked at: a lookahead in the same pattern would be
# tried at each of the lines again.
_BLANK_LINES = re.compile(r"\n[ \t\n]*\n")
_UNINDENTED = re.compile(r"[^\s})\]]")  # a closing bracket does not start a piece
_INDENTED = re.compile(r"(?: {1,4}|\t)?[^\s})\]]")
# From coarse to fine. A separator belongs to the piece before it.
_LEVELS: tuple[_Level, ...] = (_PARAGRAPHS, _LINES, _SENTENCES, _WORDS, _characters)
# Code: cut before an unindented line after a blank line, then before a slightly indented one, then at any blank line.
_CODE_LEVELS: tuple[_Level, ...] = (
    partial(_after, _BLANK_LINES, follows=_UNINDENTED),
    partial(_after, _BLANK_LINES, follows=_INDENTED),
    partial(_after, _BLANK_LINES),
    _LINES,
    _WORDS,
    _characters,
)
_CHARACTERS = 64  # upper bound of a token's mean length over a part
_FIRST_GUESS = 3  # characters per token of the first chunk
_GUESSES = 4
_ENCODED = 16  # cached texts with token ids: each piece is encoded to measure it, and again to pack it
_COMMENT = re.compile(r"#{1,6} [^\n]*\n\s*")
_LONG_WORD = 24
"""Characters of a word that may be cut to keep its beginning with a heading, as in scripts without blanks."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a document."""

    index: int  # in the document, from 0
    text: str
    token_ids: tuple[int, ...]
    start: int  # character range start:end in the document
    end: int
    locator: Locator = NOWHERE  # part, lines and headings in the file


def iter_cut(
    text: str, encode: Encode, max_tokens: int, kind: Kind = "text", tables: Tables | None = None
) -> Iterator[Chunk]:
    """Yield chunks of at most max_tokens tokens; their ranges joined are `text`. Megabytes of text take seconds.

    Whole paragraphs are packed while they fit. A chunk that is at least half full ends before a heading. A heading
    stays with the paragraph after it, or with as much of the paragraph as fits. In code, whole functions and classes
    are packed. A row of a table that does not fit is cut between cells. A single character of more than max_tokens
    tokens becomes its own chunk.

    encode: maps text to token ids, without special tokens.
    tables: of the text, with what chunks repeat of them before their own text.
    """
    is_code, encode = kind == "code", lru_cache(_ENCODED)(encode)
    tables = tables or Tables(text, encode, max_tokens)
    headings = set[int]()
    pieces = _Pieces(tables, _ends_and_headings(tables, encode, max_tokens, kind, headings), headings)
    index = first = 0
    length = _FIRST_GUESS * max_tokens
    while pieces.has(first):
        stop, ids = _fill(pieces, first, encode, max_tokens, length)
        while not is_code and pieces.is_title(first, stop) and pieces.split(first, stop, encode, max_tokens):
            stop, ids = _fill(pieces, first, encode, max_tokens, length)
        length = pieces.start(stop) - pieces.start(first)
        if pieces.has(stop):
            for kept in _before_code(pieces, first, stop) if is_code else _before_title(pieces, first, stop):
                # a shorter text can have more tokens
                if len(shorter := pieces.ids(first, kept, encode)) <= max_tokens:
                    stop, ids = kept, shorter
                    break
        if ids:
            yield Chunk(index, pieces.text(first, stop), tuple(ids), pieces.start(first), pieces.start(stop))
            index += 1
        first = stop


class _Pieces:
    """Pieces of a text, found lazily, by number. headings: starts of headings' pieces up to the last known end."""

    def __init__(self, tables: Tables, ends: Iterator[int], headings: set[int]) -> None:
        self._tables, self._text, self._source, self._headings = tables, tables.source, ends, headings
        self._starts = array("Q", [0])  # of the pieces, and the last known end

    def has(self, number: int) -> bool:
        """Return whether there is a piece of this number."""
        while len(self._starts) - 1 <= number:
            if (end := next(self._source, None)) is None:
                return False
            self._starts.append(end)
        return True

    def reaching(self, position: int) -> int:
        """Return the number of pieces up to the one that contains the position; all of them if it is after the text."""
        while self._starts[-1] <= position and (end := next(self._source, None)) is not None:
            self._starts.append(end)
        return min(bisect_right(self._starts, position), len(self._starts) - 1)

    def start(self, number: int) -> int:
        """Return the start of a piece, which is the end of the one before."""
        return self._starts[number]

    def text(self, first: int, stop: int) -> str:
        return "".join(self._tables.shown(self.start(first), self.start(stop)))

    def ids(self, first: int, stop: int, encode: Encode) -> list[int]:
        return _ids(self._tables, self.start(first), self.start(stop), encode)

    def starts_indented(self, number: int) -> bool:
        return self._text[self.start(number)].isspace()

    def is_heading(self, number: int) -> bool:
        """Return whether a piece is a heading, or looks like one: a comment in fenced code stays with the code."""
        start, end = self.start(number), self.start(number + 1)
        return start in self._headings or _COMMENT.fullmatch(self._text, start, end) is not None

    def before_headings(self, first: int, stop: int) -> int:
        """Return the start of the headings at the end of a run, else `stop`. Blanks after a heading belong to it, and
        blanks at the start of the run."""
        begin = number = stop
        while number > first and (self.is_heading(number - 1) or self._is_blank(number - 1)):
            number -= 1
            begin = number if self.is_heading(number) else begin
        return first if number == first and begin < stop else begin

    def _is_blank(self, number: int) -> bool:
        return not self._text[self.start(number) : self.start(number + 1)].strip()

    def is_title(self, first: int, stop: int) -> bool:
        """Return whether a run has nothing but headings, and text follows."""
        return self.before_headings(first, stop) == first and self.has(stop)

    def split(self, first: int, number: int, encode: Encode, max_tokens: int) -> bool:
        """Cut a piece so that its beginning fits with the run from `first`. Return False if not even a word fits."""
        start, end = self.start(number), self.start(number + 1)
        room = max_tokens - len(self.ids(first, number, encode))
        while room > 0 and not self.is_heading(number):
            ends = list(_ends(self._tables, start, end, encode, room, _levels(self._tables)))
            together = len(_ids(self._tables, self.start(first), ends[0], encode))
            if len(ends) > 1 and self._is_cut_well(ends[0]) and together <= max_tokens:
                self._starts[number + 1 : number + 1] = array("Q", ends[:-1])
                return True
            room //= 2
        return False

    def _is_cut_well(self, end: int) -> bool:
        """Return whether a cut at `end` is between words, or in a long one."""
        before, after = self._text[max(end - _LONG_WORD, 0) : end], self._text[end : end + _LONG_WORD]
        if before[-1].isspace() or after[:1].isspace():
            return True
        return len(before.split()[-1]) + len("".join(after.split()[:1])) >= _LONG_WORD


def _ends_and_headings(
    tables: Tables, encode: Encode, max_tokens: int, kind: Kind, headings: set[int]
) -> Iterator[int]:
    """Yield the ends of pieces that fit. A heading is a piece of its own, or several if it is too long.

    headings: gets the start of each piece of a heading before its end is yielded.
    """
    start, levels = 0, _CODE_LEVELS if kind == "code" else _levels(tables)
    for begin, end in heading_spans(tables.source, kind):
        yield from _ends(tables, start, begin, encode, max_tokens, levels)
        for start in _ends(tables, begin, end, encode, max_tokens, levels):
            headings.add(begin)
            yield start
            begin = start
    yield from _ends(tables, start, len(tables.source), encode, max_tokens, levels)


def _levels(tables: Tables) -> tuple[_Level, ...]:
    return *_LEVELS[:2], tables.cell_ends, *_LEVELS[2:]


def _ends(
    tables: Tables, start: int, end: int, encode: Encode, max_tokens: int, levels: tuple[_Level, ...]
) -> Iterator[int]:
    """Yield the ends of pieces that fit, cut at the coarsest level possible."""
    for stop in levels[0](tables.source, start, end):
        if len(levels) == 1 or _fits(tables, start, stop, encode, max_tokens):
            yield stop
        else:
            yield from _ends(tables, start, stop, encode, max_tokens, levels[1:])
        start = stop


def _ids(tables: Tables, start: int, end: int, encode: Encode) -> list[int]:
    """Return the token ids of a range, after those of what is repeated before it."""
    repeated, text = tables.shown(start, end)
    return [*encode(repeated), *encode(text)] if repeated else encode(text)


def _fits(tables: Tables, start: int, end: int, encode: Encode, max_tokens: int) -> bool:
    """Return whether a range has at most max_tokens tokens, with what is repeated before it.

    Short ASCII texts have at most one token per character and one before the text, so they fit without being encoded.
    Texts that are far too long are not encoded either.
    """
    if end - start > _CHARACTERS * max_tokens:
        return False
    repeated, piece = tables.shown(start, end)
    room = max_tokens - (len(encode(repeated)) if repeated else 0)
    return (len(piece) < room and piece.isascii()) or len(encode(piece)) <= room


def _fill(pieces: _Pieces, first: int, encode: Encode, max_tokens: int, length: int) -> tuple[int, list[int]]:
    """Return the end of the longest run from `first` that fits, and its token ids. The run has at least one piece of
    any size.

    length: characters of the run to try first. A run that fits grows until it is too long, by its tokens per character
    and by at least twice the last step. Then the end is interpolated by token count, and bisected after a few misses.
    A chunk takes only a few calls of `encode`, even if the pieces are small.
    """
    stop, over = first, 0  # end of the longest run that fits, and of the shortest that does not
    misses = step = 0
    ids, too_many = list[int](), list[int]()  # token ids of these two
    end = pieces.reaching(pieces.start(first) + length)
    while end > stop:
        tried = pieces.ids(first, end, encode)
        if len(tried) <= max_tokens:
            stop, ids = end, tried
        else:
            over, too_many = end, tried
        begin = pieces.start(stop)
        if not over:
            step = max((begin - pieces.start(first)) * (max_tokens - len(ids)) // max(len(ids), 1), 2 * step, 1)
            end = pieces.reaching(begin + min(step, begin - pieces.start(first)))
            continue
        if misses < _GUESSES:
            share = (max_tokens - len(ids)) / (len(too_many) - len(ids))
            end = pieces.reaching(begin + int((pieces.start(over) - begin) * share))
        else:
            end = (stop + over) // 2
        end = min(max(end, stop + 1), over - 1)
        misses += 1
    return (stop, ids) if stop > first else (over, too_many)


def _before_title(pieces: _Pieces, first: int, stop: int) -> Iterator[int]:
    """Yield better ends of the run, best first: before its trailing headings, else before the section that it would
    cut."""
    end = pieces.before_headings(first, stop)
    if end == first:  # not even a word of text fits with all headings
        yield from (n for n in range(stop - 1, first, -1) if pieces.is_heading(n))
    elif end < stop:
        yield from (n for n in range(end, first, -1) if pieces.before_headings(first, n) == n)
    elif not pieces.is_heading(stop):
        title = next((n for n in _second_half(pieces, first, stop) if pieces.is_heading(n)), first)
        if (before := pieces.before_headings(first, title)) > first:
            yield before


def _before_code(pieces: _Pieces, first: int, stop: int) -> Iterator[int]:
    """Yield the start of the run's last definition if the run would cut it."""
    if pieces.starts_indented(stop):
        yield from islice((n for n in _second_half(pieces, first, stop) if not pieces.starts_indented(n)), 1)


def _second_half(pieces: _Pieces, first: int, stop: int) -> Iterator[int]:
    """Yield the numbers of the pieces in the second half of the run, last first."""
    half = (pieces.start(stop) - pieces.start(first)) / 2
    for number in range(stop - 1, first, -1):
        if pieces.start(stop) - pieces.start(number) > half:
            return
        yield number
