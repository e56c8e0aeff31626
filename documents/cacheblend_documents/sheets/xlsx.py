"""Excel workbooks (.xlsx), read from their XML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from heapq import merge
from operator import itemgetter

from cacheblend_documents.converted import Converted, Mark, joined
from cacheblend_documents.inline_marks import comment_mark
from cacheblend_documents.office.drawing_text import body_text, resolve_alternatives
from cacheblend_documents.office.drawings import DRAWN, drawn_text
from cacheblend_documents.office.package import OfficePackage, integer, outermost, reporting_damage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.sheets.tables import Cells, numbered_lines
from cacheblend_documents.sheets.workbook import Sheet, SheetCells, Workbook, string_text

_ROW = re.compile(r"[A-Z]{1,3}(\d{1,7})")


def from_xlsx(data: bytes) -> Converted:
    """Convert each row of each sheet to one line. Formulas have the values that were saved with the file."""
    names, omissions, unsaved = set[str](), Omissions(), Omissions()
    book = Workbook(OfficePackage(data, "a workbook"), omissions)
    parts = []
    for sheet in book.sheets:
        lines = list(_lines(book, sheet, names, omissions, unsaved))
        if lines:
            parts.append((f"# {sheet.name}\n\n" + "\n".join(lines).lstrip("\n"), Mark(0, f"sheet {sheet.name}")))
    for sentence in unsaved:
        omissions.say(f"{sentence}: open the file in a spreadsheet program and save it")
    return joined(parts, "markdown", columns=frozenset(names), omissions=omissions)


def _lines(book: Workbook, sheet: Sheet, names: set[str], omissions: Omissions, unsaved: Omissions) -> Iterator[str]:
    """Yield the lines of a sheet: rows with the comments on them, then the text boxes. names: see `numbered_lines`."""
    place, cells = f"sheet {sheet.name}", SheetCells(book, sheet.part)
    notes = list[tuple[str, int]]()
    with reporting_damage(omissions, f"the comments on {place} cannot be read"):
        notes = _comments(book.package, sheet.part, book.persons)
    lines = numbered_lines(_rows(cells, omissions, place), names)
    yield from (line for line, _ in merge(lines, notes, key=itemgetter(1)))
    if cells.num_unsaved:
        plural = "formulas without saved values"
        unsaved.add("formula without a saved value", place, count=cells.num_unsaved, plural=plural)
    if cells.num_unknown:
        omissions.add(
            "cell whose text is missing", place, count=cells.num_unknown, plural="cells whose text is missing"
        )
    for text in _drawn_texts(book.package, sheet.part, omissions, place):
        yield from ("", text)


def _rows(cells: SheetCells, omissions: Omissions, place: str) -> Iterator[tuple[int, Cells]]:
    """Yield the rows that can be read."""
    with reporting_damage(omissions, f"{place} cannot be read, or not all of it"):
        yield from cells.rows()


def _comments(package: OfficePackage, sheet: str, persons: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return ("Comment on B4 by Mara: Only until May", row number) of the comments on a sheet, by row.

    sheet: name of its part. persons: identifier -> name. Raises DamagedPart.
    """
    found = list[tuple[str, str, str]]()  # cell, author, text
    for part in package.related(sheet, "threadedComment"):
        for element in package.xml(part).iter("threadedComment"):
            author = persons.get(element.get("personId", ""), "")
            text = " ".join(element.findtext("text", "").split())
            found.append((element.get("ref", ""), author, text))
    threaded = {cell for cell, _, _ in found}
    for part in package.related(sheet, "comments"):
        root = package.xml(part)
        authors = {number: author.text or "" for number, author in enumerate(root.iter("x:author"))}
        for element in outermost(root, "x:comment"):
            author, cell = authors.get(integer(element.get("authorId"), -1), ""), element.get("ref", "")
            if cell not in threaded:  # else a copy for old programs
                found.append((cell, author, string_text(element).removeprefix(f"{author}:").strip()))
    lines = [
        (comment_mark(author, f"Comment on {cell}") + text, int(m[1]) if (m := _ROW.fullmatch(cell)) else 0)
        for cell, author, text in found
        if text
    ]
    return sorted(lines, key=itemgetter(1))


def _drawn_texts(package: OfficePackage, sheet: str, omissions: Omissions, place: str) -> list[str]:
    """Return the texts of the shapes, charts and diagrams that are drawn on a sheet. sheet: name of its part."""
    texts = list[str]()
    for part in package.related(sheet, "drawing"):
        with reporting_damage(omissions, f"the drawings on {place} cannot be read"):
            texts += map(body_text, resolve_alternatives(package.xml(part)).iter("txBody"))
            for relation in package.relations(part).values():
                if (thing := DRAWN.get(relation.kind)) is not None:
                    texts.append(drawn_text(package, relation, thing, omissions, place))
    return list(filter(None, texts))
