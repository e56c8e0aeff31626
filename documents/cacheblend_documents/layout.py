"""Layout of a document's text: its parts, lines and kind of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

NAME_CHARACTERS = 256
"""Limit of titles, headings and names of parts. Every chunk of a document, and every citation, has a copy of them."""
MOST_OMISSIONS = 64
"""Limit of the omissions of a document, each within NAME_CHARACTERS. They are kept with the document."""

Kind = Literal["text", "markdown", "rst", "code"]


def shortened(name: str) -> str:
    """Return a title or heading within the limit, with an ellipsis for the rest."""
    return name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 1] + "\u2026"


def bounded_omissions(omissions: Iterable[str]) -> tuple[str, ...]:
    """Return the omissions within the limits, each on one line and without control characters."""
    lines = (" ".join(shortened(text).split()) for text in islice(omissions, MOST_OMISSIONS))
    return tuple("".join(filter(str.isprintable, line)) for line in lines)


def told_apart(name: str) -> str:
    """Return a name within the limit. A digest of the whole stands for the rest, so that long names stay different."""
    if len(name) <= NAME_CHARACTERS:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: NAME_CHARACTERS - len(digest) - 2]}\u2026 {digest}"


@dataclass(frozen=True)
class Mark:
    """Start of a part of a document."""

    start: int  # character in the text
    part: str = ""  # "page 3", "sheet Budget"; within NAME_CHARACTERS
    line: int = 0  # in the file; 0 if unknown

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", told_apart(self.part))


@dataclass(frozen=True)
class TextLayout:
    """Structure of a document's text."""

    kind: Kind = "text"  # syntax of headings and definitions, used to choose where to cut
    numbered: bool = True  # lines of the text are lines of the file
    marks: tuple[Mark, ...] = ()  # parts of a converted file, in order
    apart: bool = False  # cut at every mark
    title: str = ""  # title found in the file; within NAME_CHARACTERS
    names: frozenset[str] | None = None  # columns of sheets, whose rows are lines: "name: Ada, city: Bergen"
    omissions: tuple[str, ...] = ()  # parts that the converter left out, in words
    scanned: tuple[int, ...] = ()  # numbers of the pages, from 1, whose text is only in an image

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", shortened(self.title))
        object.__setattr__(self, "omissions", bounded_omissions(self.omissions))


PLAIN = TextLayout()


@dataclass(frozen=True)
class Converted:
    """Text of a file and its layout."""

    text: str
    layout: TextLayout = PLAIN
