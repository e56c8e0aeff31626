"""Layout of a document's text: its parts, lines and kind of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "markdown", "rst", "code"]


@dataclass(frozen=True)
class Mark:
    """Start of a part ("page 3", "sheet Budget") at a character, and its line in the file, 0 if unknown."""

    start: int
    part: str = ""
    line: int = 0


@dataclass(frozen=True)
class Layout:
    """kind: syntax of headings and definitions, which decides where to cut. numbered: the text's lines are the file's lines.
    marks: parts of a converted file, in order. apart: cut at every mark. title: title in the file. note: warning about the
    conversion."""

    kind: Kind = "text"
    numbered: bool = True
    marks: tuple[Mark, ...] = ()
    apart: bool = False
    title: str = ""
    note: str = ""


PLAIN = Layout()


@dataclass(frozen=True)
class Converted:
    """Text of a file and its layout."""

    text: str
    layout: Layout = PLAIN
