"""Excel workbooks (.xlsx), read from their XML."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from operator import itemgetter

from cacheblend_documents.converter import NoDocument, joined, parsing
from cacheblend_documents.layout import Converted, Mark
from cacheblend_documents.office.package import OfficePackage, reporting_damage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.sheets.sheet_notes import comments, drawn_texts
from cacheblend_documents.sheets.tables import Cells, numbered_lines
from cacheblend_documents.sheets.workbook import Sheet, SheetCells, Workbook


def from_xlsx(data: bytes) -> Converted:
    """Convert each row of each sheet to one line. Formulas have the values that were saved with the file."""
    names, omissions, unsaved = set[str](), Omissions(), Omissions()
    with parsing("defusedxml", what := "a workbook"):
        book = Workbook(OfficePackage(data, what), omissions)
        parts = []
        for sheet in book.sheets:
            lines = list(_lines(book, sheet, names, omissions, unsaved))
            if lines:
                parts.append((f"# {sheet.name}\n\n" + "\n".join(lines).lstrip("\n"), Mark(0, f"sheet {sheet.name}")))
    for sentence in unsaved:
        omissions.say(f"{sentence}: open the file in a spreadsheet program and save it")
    if not parts and (lost := "; ".join(omissions)):
        raise NoDocument(f"no text in its cells: {lost}", "without text")
    return joined(parts, "markdown", names=frozenset(names), omissions=omissions)


def _lines(book: Workbook, sheet: Sheet, names: set[str], omissions: Omissions, unsaved: Omissions) -> Iterator[str]:
    """Yield the lines of a sheet: rows with the comments on them, then the text boxes. names: see `numbered_lines`."""
    place, cells = f"sheet {sheet.name}", SheetCells(book, sheet.part)
    notes = list[tuple[str, int]]()
    with reporting_damage(omissions, f"the comments on {place} cannot be read"):
        notes = comments(book.package, sheet.part, book.persons)
    lines = numbered_lines(_rows(cells, omissions, place), names)
    yield from (line for line, _ in merge(lines, notes, key=itemgetter(1)))
    if cells.num_unsaved:
        plural = "formulas without saved values"
        unsaved.add("formula without a saved value", place, count=cells.num_unsaved, plural=plural)
    if cells.num_unknown:
        omissions.add(
            "cell whose text is missing", place, count=cells.num_unknown, plural="cells whose text is missing"
        )
    for text in drawn_texts(book.package, sheet.part, omissions, place):
        yield from ("", text)


def _rows(cells: SheetCells, omissions: Omissions, place: str) -> Iterator[tuple[int, Cells]]:
    """Yield the rows that can be read."""
    with reporting_damage(omissions, f"{place} cannot be read, or not all of it"):
        yield from cells.rows()
