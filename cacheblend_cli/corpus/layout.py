"""How the text of a document lies in its file: its parts, its lines, and what kind of text it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "markdown", "rst", "code"]


@dataclass(frozen=True)
class Mark:
    """From this character on the text is of this part ("page 3", "sheet Budget"), and of this line of the file, 0 where
    lines are not known."""

    start: int
    part: str = ""
    line: int = 0


@dataclass(frozen=True)
class Layout:
    """kind: what headings and definitions look like, and where it is cut. numbered: its lines are the file's lines. marks:
    the parts of a file that was converted, in order. apart: no chunk runs from one mark into the next. title: what the
    file says it is called. note: what a reader has to know of the conversion."""

    kind: Kind = "text"
    numbered: bool = True
    marks: tuple[Mark, ...] = ()
    apart: bool = False
    title: str = ""
    note: str = ""


PLAIN = Layout()


@dataclass(frozen=True)
class Converted:
    """The text of a file and how it lies there."""

    text: str
    layout: Layout = PLAIN
