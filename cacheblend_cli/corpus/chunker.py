"""Cut documents into chunks, losslessly: at paragraphs, else lines, sentences, words, characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from cacheblend_store import NOWHERE, Locator

from cacheblend_cli.corpus.layout import Kind

Encode = Callable[[str], list[int]]

# From coarse to fine. Every level matches all of the text: a separator belongs to the piece before it.
_LEVELS = (
    re.compile(r".*?(?:\n[ \t]*\n\s*|\Z)", re.DOTALL),  # paragraphs with the blank lines after them
    re.compile(r".*?(?:\n|\Z)", re.DOTALL),
    re.compile(r".*?(?:[.!?]\s+|\Z)", re.DOTALL),
    re.compile(r"\s*\S+\s*|\s+", re.DOTALL),
    re.compile(r".", re.DOTALL),
)
# Code: cut before an unindented line after a blank line, then before a slightly indented one, then at any blank line.
# A closing bracket does not start a piece.
_CODE_LEVELS = (
    re.compile(r".*?(?:\n(?:[ \t]*\n)+(?=[^\s})\]])|\Z)", re.DOTALL),
    re.compile(r".*?(?:\n(?:[ \t]*\n)+(?=(?: {1,4}|\t)?[^\s})\]])|\Z)", re.DOTALL),
    re.compile(r".*?(?:\n(?:[ \t]*\n)+|\Z)", re.DOTALL),
    _LEVELS[1],
    *_LEVELS[3:],
)
_CHARACTERS = 64  # upper bound of a token's mean length over a part
_GUESSES = 4
_ENCODED = 16  # cached texts with token ids: each piece is encoded to measure it, and again to pack it
_HEADING = re.compile(
    r"#{1,6} [^\n]*\n\s*|[^\n]+\n([=~^*+#\-])\1{2,}[ \t]*\n\s*"
)  # Markdown heading or underlined line


@dataclass(frozen=True)
class Chunk:
    """A piece of a document."""

    index: int  # in the document, from 0
    text: str
    token_ids: tuple[int, ...]
    start: int  # character range start:end in the document
    end: int
    locator: Locator = NOWHERE  # part, lines and headings in the file


def iter_cut(text: str, encode: Encode, max_tokens: int, kind: Kind = "text") -> Iterator[Chunk]:
    """Yield chunks of at most max_tokens tokens; their texts joined are `text`. Megabytes of text take seconds.

    Whole paragraphs are packed while they fit. A heading stays with the text after it, and a chunk that is at least
    half full ends before a heading. In code, whole functions and classes are packed. A single character of more than
    max_tokens tokens becomes its own chunk.

    encode: maps text to token ids, without special tokens.
    """
    is_code, encode = kind == "code", lru_cache(_ENCODED)(encode)
    pieces = _Pieces(_pieces(text, encode, max_tokens, _CODE_LEVELS if is_code else _LEVELS))
    index = first = start = 0
    while pieces.upto(first + 1) > first:
        stop, ids = _fill(pieces, first, encode, max_tokens)
        if stop < pieces.upto(stop + 1):
            kept = (
                _before_code(pieces, first, stop) if is_code else _before_title(pieces, first, stop, encode, max_tokens)
            )
            if kept < stop:
                stop, ids = kept, encode(pieces.text(first, kept))
        body = pieces.text(first, stop)
        if ids:
            yield Chunk(index, body, tuple(ids), start, start + len(body))
            index += 1
        first, start = stop, start + len(body)


class _Pieces:
    """Pieces of a text, cut lazily."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source, self._found = source, list[str]()

    def __getitem__(self, number: int) -> str:
        return self._found[number]

    def upto(self, stop: int) -> int:
        """Return the number of pieces, at most `stop`."""
        self._found.extend(islice(self._source, max(0, stop - len(self._found))))
        return min(stop, len(self._found))

    def text(self, first: int, stop: int) -> str:
        return "".join(self._found[first:stop])


def _pieces(text: str, encode: Encode, max_tokens: int, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Yield parts that fit, cut at the coarsest level possible."""
    for part in (m.group() for m in levels[0].finditer(text) if m.group()):
        if len(levels) == 1 or _fits(part, encode, max_tokens):
            yield part
        else:
            yield from _pieces(part, encode, max_tokens, levels[1:])


def _fits(text: str, encode: Encode, max_tokens: int) -> bool:
    """Return whether the text has at most max_tokens tokens.

    Short ASCII texts have at most one token per character and one before the text, so they fit without being encoded.
    Texts that are far too long are not encoded either.
    """
    if len(text) < max_tokens and text.isascii():
        return True
    return len(text) <= _CHARACTERS * max_tokens and len(encode(text)) <= max_tokens


def _fill(pieces: _Pieces, first: int, encode: Encode, max_tokens: int) -> tuple[int, list[int]]:
    """Return the end of the longest run from `first` that fits, and its token ids. The run has at least one piece of
    any size.

    The run doubles until it is too long; then the end is interpolated by token count, and bisected after a few misses.
    A chunk takes only a few calls of `encode`, even if the pieces are small.
    """
    stop, ids = first + 1, encode(pieces[first])
    over, num_over, misses = 0, 0, 0  # end and token count of the shortest run that is too long
    while not over or over - stop > 1:
        if not over:
            end = pieces.upto(2 * stop - first)
            if end == stop:
                break
        elif misses < _GUESSES:
            share = (max_tokens - len(ids)) / (num_over - len(ids))
            end = min(max(stop + int((over - stop) * share), stop + 1), over - 1)
        else:
            end = (stop + over) // 2
        tried = encode(pieces.text(first, end))
        misses += bool(over)
        if len(tried) <= max_tokens:
            stop, ids = end, tried
        else:
            over, num_over = end, len(tried)
    return stop, ids


def _before_headings(pieces: _Pieces, first: int, stop: int) -> int:
    """Return where the run's trailing headings begin; `stop` if there are none, or nothing else."""
    end = stop
    while end > first and _HEADING.fullmatch(pieces[end - 1]):
        end -= 1
    return end if end > first else stop


def _before_title(pieces: _Pieces, first: int, stop: int, encode: Encode, max_tokens: int) -> int:
    """Return a better end of the run: before its trailing headings if the next piece fits with them, else before the
    section that the run would cut. Return `stop` if there is none."""
    end = _before_headings(pieces, first, stop)
    if end < stop:
        return end if len(encode(pieces.text(end, stop + 1))) <= max_tokens else stop
    if _HEADING.fullmatch(pieces[stop]):
        return stop
    titles = (n for n in _second_half(pieces, first, stop) if _HEADING.fullmatch(pieces[n]))
    title = next(titles, stop)
    return next((n for n in range(title, first, -1) if not _HEADING.fullmatch(pieces[n - 1])), stop)


def _before_code(pieces: _Pieces, first: int, stop: int) -> int:
    """Return where the run's last definition begins if the run would cut it, else `stop`."""
    if not pieces[stop][0].isspace():
        return stop
    return next((n for n in _second_half(pieces, first, stop) if not pieces[n][0].isspace()), stop)


def _second_half(pieces: _Pieces, first: int, stop: int) -> Iterator[int]:
    """Yield the indices of the pieces in the second half of the run, last first."""
    half, behind = len(pieces.text(first, stop)) / 2, 0
    for number in range(stop - 1, first, -1):
        behind += len(pieces[number])
        if behind > half:
            return
        yield number
