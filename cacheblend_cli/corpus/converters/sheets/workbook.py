"""Workbooks in Open XML: their sheets, and the texts of the cells of a sheet.

A sheet is parsed in pieces and only its filled cells are kept, so that a stray cell in the last row costs nothing. The
size that a sheet declares is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from xml.parsers import expat

from cacheblend_cli.corpus.converters.office.package import DamagedPart, OfficePackage
from cacheblend_cli.corpus.converters.sheets.merged_cells import MergedCells
from cacheblend_cli.corpus.converters.sheets.number_formats import BUILT_IN, cell_text

_PIECE = 1 << 18  # bytes of XML to parse at a time
_MERGE = re.compile(rb"""ref=["']([A-Z]{1,3})(\d{1,7}):([A-Z]{1,3})(\d{1,7})["']""")
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")  # a control character


@dataclass(frozen=True)
class Sheet:
    """A sheet of a workbook."""

    name: str
    part: str  # name of its part in the package, which may be missing


class Workbook:
    """Sheets of a workbook, and what their cells refer to."""

    def __init__(self, package: OfficePackage) -> None:
        """Raises NoDocument if the package is not a workbook."""
        self.package, self.part = package, package.main
        self.sheets, self.is_1904 = self._sheets()
        self.formats, self.has_formats = self._formats()
        self.strings = self._strings()
        self.persons, self.has_persons = self._persons()

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

    def _formats(self) -> tuple[list[str], bool]:
        """Return (number format of each style of a cell, whether they can be read)."""
        try:
            roots = [self.package.xml(part) for part in self.package.related(self.part, "styles")[:1]]
        except DamagedPart:
            return [], False
        codes = {str(key): code for key, code in BUILT_IN.items()}
        for root in roots:
            codes |= {f.get("numFmtId", ""): f.get("formatCode", "") for f in root.iter("x:numFmt")}
        styles = [xf for root in roots for styles in root.iter("x:cellXfs") for xf in styles]
        return [codes.get(xf.get("numFmtId", ""), "") for xf in styles], True

    def _strings(self) -> list[str]:
        """Return the shared strings that can be read."""
        strings = list[str]()
        with suppress(DamagedPart):
            for part in self.package.related(self.part, "sharedStrings")[:1]:
                strings.extend(_strings(self.package.data(part)))
        return strings

    def _persons(self) -> tuple[dict[str, str], bool]:
        """Return (identifier -> name of each author of comments, whether they can be read)."""
        persons = dict[str, str]()
        try:
            for part in self.package.related(self.part, "person"):
                persons |= {p.get("id", ""): p.get("displayName", "") for p in self.package.xml(part).iter("person")}
        except DamagedPart:
            return persons, False
        return persons, True


def _strings(data: bytes) -> Iterator[str]:
    """Yield the shared strings, without phonetic guides."""
    found, text, state = list[str](), list[str](), {"t": 0, "rPh": 0}

    def start(name: str, attributes: dict[str, str]) -> None:
        local = name[name.find(":") + 1 :]
        if local in state:
            state[local] += 1

    def end(name: str) -> None:
        local = name[name.find(":") + 1 :]
        if local in state:
            state[local] -= 1
        elif local == "si":
            found.append(_one_line("".join(text)))
            text.clear()

    def characters(piece: str) -> None:
        if state["t"] and not state["rPh"]:
            text.append(piece)

    for _ in _pieces(data, start, end, characters):
        yield from found
        found.clear()


class SheetCells:
    """Cells of a sheet. The counts are those of the rows read so far."""

    def __init__(self, book: Workbook, part: str) -> None:
        self.num_unsaved = 0  # formulas without a saved value
        self.num_unknown = 0  # cells that refer to a string that is missing
        self._book, self._part = book, part
        self._styles: list[str] = []

    def rows(self) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield (row number, column -> text). See `MergedCells.spread`.

        Raises DamagedPart after the rows that can be read.
        """
        data = self._book.package.data(self._part)
        return _merged_cells(data).spread(self._cells(data))

    def _cells(self, data: bytes) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield (row number, column -> text) of the rows in the file."""
        found, cells, text = list[tuple[int, dict[int, str]]](), dict[int, str](), list[str]()
        row = column = -1
        kind = style = ""
        in_cell = in_value = has_formula = is_phonetic = False

        def start(name: str, attributes: dict[str, str]) -> None:
            nonlocal row, column, cells, kind, style, in_cell, in_value, has_formula, is_phonetic
            local = name[name.find(":") + 1 :]
            if local == "c":
                column = _column(attributes.get("r", "").rstrip("0123456789")) if "r" in attributes else column + 1
                kind, style = attributes.get("t", "n"), attributes.get("s", "0")
                in_cell, has_formula = True, False
                text.clear()
            elif local == "row":
                given = attributes.get("r", "")
                row = int(given) if given.isdecimal() and len(given) < 12 else max(row, 0) + 1
                cells, column = {}, -1
            elif in_cell:
                in_value |= local in ("v", "t")
                has_formula |= local == "f"
                is_phonetic |= local == "rPh"

        def end(name: str) -> None:
            nonlocal in_cell, in_value, is_phonetic
            local = name[name.find(":") + 1 :]
            if local in ("v", "t"):
                in_value = False
            elif local == "c":
                in_cell = False
                if value := self._text(kind, style, "".join(text)):
                    cells[column] = value
                elif has_formula and kind != "str":
                    self.num_unsaved += 1
            elif local == "rPh":
                is_phonetic = False
            elif local == "row":
                found.append((row, cells))

        def characters(piece: str) -> None:
            if in_value and not is_phonetic:
                text.append(piece)

        for _ in _pieces(data, start, end, characters):
            yield from found
            found.clear()

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
            return _one_line(value)
        value = value.strip()
        if kind == "b" and value:
            return "FALSE" if value in ("0", "false") else "TRUE"
        if kind == "d":
            return value.removesuffix("Z").removesuffix("T00:00:00").replace("T", " ")
        formats = self._book.formats
        number = int(style) if style.isdecimal() and len(style) < 9 else 0
        return value and cell_text(value, formats[number] if number < len(formats) else "", is_1904=self._book.is_1904)


def _pieces(
    data: bytes,
    start: Callable[[str, dict[str, str]], None],
    end: Callable[[str], None],
    characters: Callable[[str], None],
) -> Iterator[None]:
    """Parse XML, and yield after each piece. Raises DamagedPart at the end of what can be parsed, and for entities."""

    def refuse(*declaration: object) -> None:
        raise DamagedPart("entities")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, characters
    view = memoryview(data)
    try:
        for begin in range(0, len(data), _PIECE):
            parser.Parse(view[begin : begin + _PIECE], False)
            yield
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        yield
        raise DamagedPart("XML") from error


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
