"""Text of an RTF document or note while it is read: paragraphs and rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cacheblend_documents.converted import shortened
from cacheblend_documents.inline_marks import shown

BODY = 9
"""Outline level of paragraphs that are not headings."""


@dataclass
class RtfText:
    """Text of a destination: its lines, and its paragraph and row so far."""

    mark: str = ""
    lines: list[str] = field(default_factory=list)  # paragraphs and rows, with the line ends after them
    is_table: bool = False  # the last line is a row
    pieces: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # notes that follow the paragraph

    @property
    def is_empty(self) -> bool:
        return not (self.lines or self.cells or shown("".join(self.pieces)).strip())

    def add(self, line: str, is_row: bool) -> None:
        self.lines += ["\n"] * (self.is_table and not is_row)
        self.lines.append(line + ("\n" if is_row else "\n\n"))
        self.is_table = is_row

    def end_paragraph(self, outline: int = BODY) -> None:
        """End the paragraph, with its notes after it."""
        lines = (line.strip() for line in shown("".join(self.pieces)).split("\n"))
        if paragraph := "\n".join(filter(None, lines)):
            is_heading = 0 <= outline < 6
            self.add(f"{'#' * (outline + 1)} {' '.join(paragraph.split())}" if is_heading else paragraph, is_row=False)
        for note in self.after:
            self.add(note, is_row=False)
        self.pieces.clear()
        self.after.clear()

    def end_row(self, kinds: Sequence[str] = (), above: Sequence[str] = ()) -> list[str]:
        """End the row of a table and return its cells. Merged cells have the value of the one above or to the left."""
        cells = list[str]()
        for place, cell in enumerate(self.cells):
            kind = kinds[place] if place < len(kinds) else ""
            if not cell and kind == "v" and place < len(above):
                cell = shortened(above[place])
            elif not cell and kind == "m" and cells:
                cell = shortened(cells[-1])
            cells.append(cell)
        self.cells.clear()
        if any(cells):
            self.add(" | ".join(cells), is_row=True)
        return cells
