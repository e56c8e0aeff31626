"""Layout of a document's text: its parts, lines and kind of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "markdown", "rst", "code"]


@dataclass(frozen=True)
class Mark:
    """Start of a part of a document."""

    start: int  # character in the text
    part: str = ""  # "page 3", "sheet Budget"
    line: int = 0  # in the file; 0 if unknown


@dataclass(frozen=True)
class TextLayout:
    """Structure of a document's text."""

    kind: Kind = "text"  # syntax of headings and definitions, used to choose where to cut
    numbered: bool = True  # lines of the text are lines of the file
    marks: tuple[Mark, ...] = ()  # parts of a converted file, in order
    apart: bool = False  # cut at every mark
    title: str = ""  # title found in the file
    note: str = ""  # warning about the conversion


PLAIN = TextLayout()


@dataclass(frozen=True)
class Converted:
    """Text of a file and its layout."""

    text: str
    layout: TextLayout = PLAIN
