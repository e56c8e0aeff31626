"""Tables of Word documents as lines: merged cells repeat their text, so that each row keeps its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Block(NamedTuple):
    """A paragraph, a list item or a table."""

    text: str
    level: int = 0  # of a heading, from 1
    indent: int | None = None  # level of a list item, from 0
    is_table: bool = False


@dataclass(frozen=True)
class Cell:
    """A table cell. A cell that continues the one above it is merged."""

    start: int  # first column of the table's grid
    span: int
    is_merged: bool
    blocks: Sequence[Block]

    @property
    def text(self) -> str:
        tables = (
            block.text.replace(" | ", ", ").replace("\n", "; ") if block.is_table else block.text
            for block in self.blocks
        )
        return " ".join(" ".join(tables).split())


_REPEATED = 100  # maximum characters of a text to repeat
_COLUMNS = 63  # limit of Word
_LAYOUT_BLOCKS = 3  # a cell with more blocks and a heading is a part of the page, not a value


def table_blocks(rows: Sequence[Sequence[Cell]]) -> Iterator[Block]:
    """Yield a table as one block of lines, or the content of its cells if the table only arranges text on the page."""
    cells = [cell for row in rows for cell in row]
    if all(len(row) < 2 for row in rows) or any(map(_is_layout, cells)):
        for cell in cells:
            yield from cell.blocks
    elif lines := list(_lines(rows)):
        yield Block("\n".join(lines), is_table=True)


def markdown(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the text of blocks, with an empty line after each, except between the items of a list."""
    in_list = False
    for block in blocks:
        if in_list and block.indent is None:
            yield "\n"
        in_list = block.indent is not None
        if block.indent is not None:
            blanks = "  " * block.indent
            yield blanks + block.text.replace("\n", f"\n{blanks}  ") + "\n"
        elif block.level:
            yield f"{'#' * min(block.level, 6)} {' '.join(block.text.split())}\n\n"
        else:
            yield block.text + "\n\n"


def _is_layout(cell: Cell) -> bool:
    return len(cell.blocks) > _LAYOUT_BLOCKS and any(block.level for block in cell.blocks)


def _lines(rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    starts = sorted({cell.start for row in rows for cell in row})
    columns = {start: n for n, start in enumerate(starts)}
    # a form, whose rows have cells of various widths, has no columns to keep
    is_grid = len(starts) <= _COLUMNS and any(len(row) == len(starts) for row in rows)
    above = dict[int, str]()  # column -> text of the cell above
    for row in rows:
        texts, known, has_text = list[str](), dict[int, str](), False
        for n, cell in enumerate(row):
            text = own = cell.text
            if cell.is_merged and not own:
                text = above.get(cell.start, "")
            has_text = has_text or bool(own)
            repeated = text if len(text) <= _REPEATED else ""
            known[cell.start] = repeated
            if is_grid:
                end = columns.get(row[n + 1].start, len(starts)) if n + 1 < len(row) else _end(cell, starts)
                texts += [""] * (columns[cell.start] - len(texts)) + [text]
                texts += [repeated if len(row) > 1 else ""] * (end - len(texts))
            else:
                texts.append(text)
        above = known
        if has_text:
            yield " | ".join(texts).rstrip() if any(texts[1:]) else texts[0]


def _end(cell: Cell, starts: Sequence[int]) -> int:
    """Return the number of columns that start before the cell ends."""
    return sum(start < cell.start + cell.span for start in starts)
