"""The text of a document and its structure, or the reason why there is none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Literal

NAME_CHARACTERS = 256
"""Limit of titles, headings and names of parts, of which an index may keep many copies."""
MOST_OMISSIONS = 64
"""Limit of the omissions of a document, each within NAME_CHARACTERS."""
SCANNED = "scanned PDFs"
"""Group of PDFs that have text only in images."""
INSTALL = "pip install pypdfium2 python-calamine defusedxml"
"""Command that installs the libraries that some converters need."""

Kind = Literal["text", "markdown", "rst", "code"]


class NotConverted(Exception):
    """Raised for a file without text that can be read."""

    def __init__(self, reason: str, group: str = "", *, unread: bool = False) -> None:
        """reason: shown to the user.
        group: label to count similar files under; by default the reason.
        unread: the file was not looked at, so it may have text.
        """
        super().__init__(reason)
        self.reason, self.group, self.unread = reason, group or reason, unread


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Convert a missing library, or any error of a parser, to NotConverted. Messages of parsers are not for users."""
    try:
        yield
    except (NotConverted, MemoryError):
        raise
    except ImportError as error:
        raise NotConverted(f"needs {error.name}: {INSTALL}", "needing other packages", unread=True) from None
    except RecursionError as error:
        raise NotConverted("is nested too deeply", "damaged or locked") from error
    except Exception as error:
        damage = "damaged, with a password, or not what its name says"
        if type(error).__module__.startswith("defusedxml"):
            damage = "damaged: its XML has entities or refers to files"
        raise NotConverted(damage, "damaged or locked") from error


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
class Converted:
    """Text of a document, and its structure."""

    text: str
    kind: Kind = "text"  # syntax of headings and definitions
    keeps_lines: bool = True  # line n of the text is line n of the file
    marks: tuple[Mark, ...] = ()  # pages, slides, sheets, records, ... in order
    is_split: bool = False  # each mark begins a text of its own: a record, or a mail of a mailbox
    title: str = ""  # title found in the file; within NAME_CHARACTERS
    columns: frozenset[str] | None = None  # names in sheets, whose rows are lines: "name: Ada, city: Bergen"
    omissions: tuple[str, ...] = ()  # what was left out, in words
    scanned_pages: tuple[int, ...] = ()  # numbers of the pages, from 1, whose text is only in an image

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", shortened(self.title))
        object.__setattr__(self, "omissions", bounded_omissions(self.omissions))


def joined(
    parts: Iterable[tuple[str, Mark]],
    kind: Kind = "text",
    *,
    is_split: bool = False,
    title: str = "",
    columns: frozenset[str] | None = None,
    omissions: Iterable[str] = (),
) -> Converted:
    """Join parts with an empty line in between, and set the starts of their marks. Parts without text are dropped.

    omissions: read after the parts, so a generator of parts can add to them.
    """
    texts, marks, start = list[str](), list[Mark](), 0
    for text, mark in parts:
        if text := text.strip("\n"):
            texts.append(text + "\n\n")
            marks.append(Mark(start, mark.part, mark.line))
            start += len(texts[-1])
    return Converted("".join(texts), kind, False, tuple(marks), is_split, title, columns, tuple(omissions))
