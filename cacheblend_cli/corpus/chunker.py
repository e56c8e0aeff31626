"""Documents to chunks: a lossless cut at paragraphs, else lines, sentences, words, characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

# From coarse to fine. Every level matches all of the text: what separates two pieces belongs to the piece before.
_LEVELS = (
    re.compile(r".*?(?:\n[ \t]*\n\s*|\Z)", re.DOTALL),  # paragraphs with the blank lines after them
    re.compile(r".*?(?:\n|\Z)", re.DOTALL),
    re.compile(r".*?(?:[.!?]\s+|\Z)", re.DOTALL),
    re.compile(r"\s*\S+\s*|\s+", re.DOTALL),
    re.compile(r".", re.DOTALL),
)
_HEADING = re.compile(r"#{1,6} [^\n]*\n\s*|[^\n]+\n([=~^*+#\-])\1{2,}[ \t]*\n\s*")  # Markdown's, or a line underlined


@dataclass(frozen=True)
class Chunk:
    """A run of a document: its text, its token ids, and its character range start:end."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int


def cut(text: str, encode: Encode, max_tokens: int) -> list[Chunk]:
    """Cut `text` into chunks of at most max_tokens tokens; joined, the chunks' texts are the text.

    Whole paragraphs are packed while they fit, and a heading stays with what follows it. `encode` is called without
    special tokens. A single character of more than max_tokens tokens is a chunk of its own.
    """
    chunks: list[Chunk] = []
    pieces = list(_pieces(text, encode, max_tokens, 0))
    first = start = 0
    while first < len(pieces):
        stop, ids = _fill(pieces, first, encode, max_tokens)
        kept = _before_headings(pieces, first, stop)
        if kept < stop < len(pieces) and len(encode("".join(pieces[kept : stop + 1]))) <= max_tokens:
            stop, ids = kept, encode("".join(pieces[first:kept]))
        body = "".join(pieces[first:stop])
        if ids:
            chunks.append(Chunk(len(chunks), body, tuple(ids), start, start + len(body)))
        first, start = stop, start + len(body)
    return chunks


def _pieces(text: str, encode: Encode, max_tokens: int, level: int) -> Iterator[str]:
    """Parts of the text that fit, cut at the coarsest level at which they do."""
    for part in (m.group() for m in _LEVELS[level].finditer(text) if m.group()):
        if level == len(_LEVELS) - 1 or len(encode(part)) <= max_tokens:
            yield part
        else:
            yield from _pieces(part, encode, max_tokens, level + 1)


def _fill(pieces: Sequence[str], first: int, encode: Encode, max_tokens: int) -> tuple[int, list[int]]:
    """The end of the longest run from `first` that fits, and its token ids. At least one piece, whatever its size.

    The run doubles until it is too long, then halves its step: a few encodes a chunk, however fine the pieces are.
    """
    stop, ids = first + 1, encode(pieces[first])
    step, growing = 1, True
    while step:
        end = min(stop + step, len(pieces))
        tried = encode("".join(pieces[first:end])) if end > stop else None
        if tried is not None and len(tried) <= max_tokens:
            stop, ids = end, tried
            step = step * 2 if growing else step // 2
        else:
            growing, step = False, step // 2
    return stop, ids


def _before_headings(pieces: Sequence[str], first: int, stop: int) -> int:
    """Where the headings begin that the run ends with; `stop` when there are none, or nothing else."""
    end = stop
    while end > first and _HEADING.fullmatch(pieces[end - 1]):
        end -= 1
    return end if end > first else stop
