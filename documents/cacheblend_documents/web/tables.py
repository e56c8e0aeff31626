"""Tables of HTML as lines of text: `city | rate`. Cells that span rows or columns repeat their text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BETWEEN_CELLS = "\x1f"
"""Separates cells. A table within a cell has blanks instead, so the separator is written when the page is complete."""
_LONGEST_REPEATED = 200  # characters of a cell to repeat; a longer cell leaves the other places empty
_MOST_REPEATED = 10  # maximum repeated text, as a multiple of the table's own
_LAYOUT = re.compile(r"\n#{1,6} |\A#{1,6} [^\n]*\n|```\n[^\n]*\n(?!```)")
"""A heading with text, or code of several lines: the cells are parts of the page."""


@dataclass(frozen=True)
class Cell:
    text: str  # Markdown
    columns: int = 1
    rows: int = 1


def table_text(rows: Sequence[Sequence[Cell]]) -> str:
    """Return one line per row. A table for layout becomes the blocks of its cells."""
    filled = [[cell for cell in row if cell.text] for row in rows]
    if _is_layout(filled):
        blocks = "".join(cell.text + ("\n\n" if "\n" in cell.text else "\n") for row in filled for cell in row)
        return blocks.rstrip("\n") + "\n\n" if blocks else ""
    lines = [BETWEEN_CELLS.join(line) for line, row in zip(_grid(rows), filled, strict=True) if row]
    return "\n".join(lines) + "\n\n"


def _is_layout(rows: Sequence[Sequence[Cell]]) -> bool:
    """Return whether the cells are parts of the page: with headings, long texts side by side, or mainly tables."""
    wide = [row for row in rows if len(row) > 1]
    cells = [cell for row in rows for cell in row]
    if not wide or any(_LAYOUT.search(cell.text) for cell in cells):
        return True
    if len(wide) == 1 and any("\n\n" in cell.text and len(cell.text) > _LONGEST_REPEATED for cell in wide[0]):
        return True
    in_tables = sum(len(cell.text) for cell in cells if _has_table(cell.text))
    return 2 * in_tables > sum(len(cell.text) for cell in cells)


def _has_table(text: str) -> bool:
    return BETWEEN_CELLS in text and sum(BETWEEN_CELLS in line for line in text.split("\n")) > 1


def _grid(rows: Sequence[Sequence[Cell]]) -> Iterator[list[str]]:
    """Yield the texts of each row, with those of cells that span it."""
    budget = _MOST_REPEATED * (1000 + sum(len(cell.text) + 1 for row in rows for cell in row))
    spanning = dict[int, tuple[str, int]]()  # column -> text, and rows left
    for row in rows:
        line, next_spanning = list[str](), dict[int, tuple[str, int]]()
        is_alone = len(row) == 1 and not spanning
        for cell in row:
            _fill(line, spanning, next_spanning)
            text = " ".join(cell.text.replace(BETWEEN_CELLS, " ").split())
            again = text if len(text) <= _LONGEST_REPEATED else ""
            columns = 1 if is_alone else cell.columns
            columns = min(columns, 1 + max(budget, 0) // (len(again) + 1))
            if cell.rows > 1:
                next_spanning |= dict.fromkeys(range(len(line), len(line) + columns), (again, cell.rows - 1))
            line += [text, *[again] * (columns - 1)]
            budget -= (columns - 1) * (len(again) + 1)
        for column in sorted(column for column in spanning if column >= len(line)):
            line += [""] * (column - len(line))
            _fill(line, spanning, next_spanning)
        yield line
        spanning = next_spanning
        budget -= len(line) - len(row) + sum(len(text) + 1 for text, _ in spanning.values())
        if budget <= 0:
            spanning = {}


def _fill(line: list[str], spanning: dict[int, tuple[str, int]], next_spanning: dict[int, tuple[str, int]]) -> None:
    """Add the texts of cells of the rows above at the end of the line."""
    while (column := len(line)) in spanning:
        text, left = spanning.pop(column)
        line.append(text)
        if left > 1:
            next_spanning[column] = text, left - 1
