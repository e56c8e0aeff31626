"""Documents to chunks: a lossless cut at paragraphs, else lines, sentences, words, characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

_LEVELS = (
    re.compile(r".*?(?:\n[ \t]*\n\s*|\Z)", re.DOTALL),  # paragraphs with the blank lines after them
    re.compile(r".*?(?:\n|\Z)", re.DOTALL),
    re.compile(r".*?(?:[.!?]\s+|\Z)", re.DOTALL),
    re.compile(r"\s*\S+\s*|\s+", re.DOTALL),
    re.compile(r".", re.DOTALL),
)
_HEADING = re.compile(r"#{1,6} [^\n]*\n\s*\Z")


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
    at = 0
    for piece in _pack(list(_pieces(text, encode, max_tokens, 0)), encode, max_tokens):
        ids = tuple(encode(piece))
        if ids:
            chunks.append(Chunk(len(chunks), piece, ids, at, at + len(piece)))
        at += len(piece)
    return chunks


def _pieces(text: str, encode: Encode, max_tokens: int, level: int) -> Iterator[str]:
    """Parts of the text that fit, cut at the coarsest level at which they do."""
    for part in (m.group() for m in _LEVELS[level].finditer(text) if m.group()):
        if level == len(_LEVELS) - 1 or len(encode(part)) <= max_tokens:
            yield part
        else:
            yield from _pieces(part, encode, max_tokens, level + 1)


def _pack(pieces: list[str], encode: Encode, max_tokens: int) -> Iterator[str]:
    """Join adjacent pieces while they fit; a heading that would end a chunk opens the next one instead."""
    held: list[str] = []
    for piece in pieces:
        if held and len(encode("".join(held) + piece)) > max_tokens:
            headings: list[str] = []
            while len(held) > 1 and _HEADING.fullmatch(held[-1]):
                headings.insert(0, held.pop())
            if headings and len(encode("".join(headings) + piece)) > max_tokens:
                held, headings = held + headings, []
            yield "".join(held)
            held = headings
        held.append(piece)
    if held:
        yield "".join(held)
