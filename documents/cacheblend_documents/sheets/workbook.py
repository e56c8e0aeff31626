"""Workbooks in Open XML: their sheets, and the texts of the cells of a sheet.

A sheet is parsed row by row and only its filled cells are kept, so that a stray cell in the last row costs nothing. The
size that a sheet declares is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from xml.etree.ElementTree import Element

from cacheblend_documents.number_formats import BUILT_IN, cell_text
from cacheblend_documents.office.package import DamagedPart, OfficePackage, reporting_damage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.sheets.merged_cells import MergedCells

_MERGE = re.compile(rb"""ref=["']([A-Z]{1,3})(\d{1,7}):([A-Z]{1,3})(\d{1,7})["']""")
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")  # a control character


@dataclass(frozen=True)
class Sheet:
    """A sheet of a workbook."""

    name: str
    part: str  # name of its part in the package, which may be missing


class Workbook:
    """Sheets of a workbook, with its strings, number formats and authors of comments."""

    def __init__(self, package: OfficePackage, omissions: Omissions) -> None:
        """omissions: gets what cannot be read. Raises NotConverted if the package is not a workbook."""
        self.package, self.part = package, package.main
        self.sheets, self.is_1904 = self._sheets()
        self.formats = self._formats(omissions)
        self.strings = self._strings()
        self.persons = self._persons(omissions)

    def _sheets(self) -> tuple[list[Sheet], bool]:
        """Return (sheets, whether the calendar begins in 1904)."""
        sheets, listed, is_1904 = list[Sheet](), set[str](), False
        with suppress(DamagedPart):
            root, relations = self.package.xml(self.part), self.package.relations(self.part)
            for element in root.iter("x:sheet"):
                if identifier := element.get("r:id"):  # else a module of macros
                    part = relations[identifier].target if identifier in relations else ""
                    if not part or part not in listed:
                        sheets.append(Sheet(" ".join(element.get("name", "").split()), part))
                    listed.add(part)
            is_1904 = any(p.get("date1904") in ("1", "true") for p in root.iter("x:workbookPr"))
        if not any(sheet.part in self.package for sheet in sheets):  # the names are damaged, or the relations
            parts = (name for name in self.package.names if name.startswith("xl/worksheets/") and name.endswith(".xml"))
            sheets = [Sheet(str(number), part) for number, part in enumerate(parts, 1)]
        return sheets, is_1904

    def _formats(self, omissions: Omissions) -> list[str]:
        """Return the number format of each style of a cell."""
        codes = {str(key): code for key, code in BUILT_IN.items()}
        with reporting_damage(omissions, "number formats cannot be read: dates are numbers"):
            for part in self.package.related(self.part, "styles")[:1]:
                root = self.package.xml(part)
                codes |= {f.get("numFmtId", ""): f.get("formatCode", "") for f in root.iter("x:numFmt")}
                return [codes.get(xf.get("numFmtId", ""), "") for styles in root.iter("x:cellXfs") for xf in styles]
        return []

    def _strings(self) -> list[str]:
        """Return the shared strings that can be read."""
        parts = self.package.related(self.part, "sharedStrings")[:1]
        return [string_text(element) for part in parts for element in _complete(self.package, part, "x:sst")]

    def _persons(self, omissions: Omissions) -> dict[str, str]:
        """Return identifier -> name of each author of comments."""
        persons = dict[str, str]()
        with reporting_damage(omissions, "the authors of comments cannot be read"):
            for part in self.package.related(self.part, "person"):
                persons |= {p.get("id", ""): p.get("displayName", "") for p in self.package.xml(part).iter("person")}
        return persons


class SheetCells:
    """Cells of a sheet. The counts are those of the rows read so far."""

    def __init__(self, book: Workbook, part: str) -> None:
        self.num_unsaved = 0  # formulas without a saved value
        self.num_unknown = 0  # cells that refer to a string that is missing
        self._book, self._part = book, part

    def rows(self) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield (row number, column -> text). See `MergedCells.spread`.

        Raises DamagedPart after the rows that can be read.
        """
        merged = _merged_cells(self._book.package.data(self._part))
        return merged.spread(self._rows())

    def _rows(self) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield (row number, column -> text) of the rows in the file."""
        number = 0
        for row in _complete(self._book.package, self._part, "x:sheetData", damage=True):
            given = row.get("r", "")
            number = int(given) if given.isdecimal() and len(given) < 12 else number + 1
            yield number, self._cells(row)

    def _cells(self, row: Element) -> dict[int, str]:
        cells, column = dict[int, str](), -1
        for cell in row.iter("x:c"):
            place = cell.get("r")
            column = column + 1 if place is None else _column(place.rstrip("0123456789"))
            kind = cell.get("t", "n")
            value = string_text(cell) if kind == "inlineStr" else cell.findtext("x:v", "")
            if text := self._text(kind, cell.get("s", "0"), value):
                cells[column] = text
            elif kind != "str" and cell.find("x:f") is not None:
                self.num_unsaved += 1
        return cells

    def _text(self, kind: str, style: str, value: str) -> str:
        """Return the text of a cell. kind, style: its attributes."""
        if kind == "s":
            if not value.strip():
                return ""
            try:
                return self._book.strings[index] if (index := int(value)) >= 0 else ""
            except (ValueError, IndexError):
                self.num_unknown += 1
                return ""
        if kind in ("inlineStr", "str", "e"):
            return value if kind == "inlineStr" else _one_line(value)
        value = value.strip()
        if kind == "b" and value:
            return "FALSE" if value in ("0", "false") else "TRUE"
        if kind == "d":
            return value.removesuffix("Z").removesuffix("T00:00:00").replace("T", " ")
        formats = self._book.formats
        number = int(style) if style.isdecimal() and len(style) < 9 else 0
        return value and cell_text(value, formats[number] if number < len(formats) else "", is_1904=self._book.is_1904)


def _complete(package: OfficePackage, part: str, parent: str, *, damage: bool = False) -> Iterator[Element]:
    """Yield the complete children of an element. damage: raise DamagedPart after them; else it is passed over."""
    last = None
    try:
        for element in package.blocks(part, parent):
            if last is not None:
                yield last
            last = element
    except DamagedPart:
        if damage:
            raise
    else:
        if last is not None:
            yield last


def string_text(element: Element) -> str:
    """Return the text of a string or comment on one line, without phonetic guides."""
    guides = {id(text) for guide in element.iter("x:rPh") for text in guide}
    return _one_line("".join(text.text or "" for text in element.iter("x:t") if id(text) not in guides))


def _merged_cells(data: bytes) -> MergedCells:
    """Return the merged cells of a sheet. They are behind the rows in the XML."""
    merged = MergedCells()
    for element in data[max(data.rfind(b"sheetData"), 0) :].split(b"mergeCell ")[1:]:
        if match := _MERGE.search(element.partition(b">")[0]):
            letters, row, last_letters, last_row = match.groups()
            merged.add(int(row), _column(letters.decode()), int(last_row), _column(last_letters.decode()))
    return merged


@lru_cache(1 << 15)
def _column(letters: str) -> int:
    """Return the column of "A", "B", ... "XFD", counted from 0."""
    column = 0
    for letter in letters[:3].upper():
        column = column * 26 + (ord(letter) - ord("A")) % 26 + 1
    return max(column - 1, 0)


def _one_line(text: str) -> str:
    if "_x" in text:
        text = _ESCAPE.sub(lambda match: _printable(chr(int(match[1], 16))), text)
    return " ".join(text.split())


def _printable(character: str) -> str:
    return character if character.isprintable() else " "
