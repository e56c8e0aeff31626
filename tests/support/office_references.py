"""Reference texts of Office documents: the text elements of their XML parts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from defusedxml import ElementTree
from reference_sources import MOST_BYTES, NoReference, output_of, package_of


def docx_text(path: Path) -> str:
    return _office(
        path,
        r"word/(document\d*|header\d*|footer\d*|footnotes|endnotes|comments)\.xml|word/(charts/chart\d*|diagrams/data\d*)\.xml",
    )


def pptx_text(path: Path) -> str:
    return _office(
        path,
        r"ppt/(slides|notesSlides|comments|charts|diagrams)/(slide|notesSlide|comment|modernComment|chart|data)[\w-]*\.xml",
    )


def _office(path: Path, parts: str) -> str:
    with package_of(path) as package:
        names = [name for name in package.namelist() if re.fullmatch(parts, name.replace("\\", "/").lstrip("/"))]
        return "\n".join("".join(_shown(ElementTree.fromstring(package.read(name)))) for name in names)


_SPACES = frozenset("p tc tab ptab br cr pt text txBody txbxContent".split())  # a word ends behind them
_NOT_SHOWN = frozenset("Fallback moveFrom del delText instrText rPh".split())
_NOT_IN_SHEETS = _NOT_SHOWN | {"strCache", "numCache"}  # copies of cells
_TEXTS = frozenset("t text v".split())  # of runs and comments, and values of charts


def _shown(element: Any, skipped: frozenset[str] = _NOT_SHOWN) -> Iterator[str]:
    """Text elements in document order."""
    name = _name(element)
    if name in skipped or _is_footer_or_date(element, name):
        return
    if name in _TEXTS and element.text:
        yield element.text if name == "t" else f"{_number(element.text)}\n"
    order = element.find("{*}order") if name == "ser" else None
    for child in element:
        if order is None or order.get("val") == "0" or _name(child) not in ("cat", "xVal"):  # the first series has them
            yield from _shown(child, skipped)
    if name in _SPACES:
        yield "\n"


def _is_footer_or_date(element: Any, name: str) -> bool:
    """Return whether an element is a footer, a date or a slide number, which slides repeat, or dates of a chart."""
    if name == "fld":
        return str(element.get("type", "")).startswith(("slidenum", "datetime"))
    if name == "sp":
        place = element.find("{*}nvSpPr/{*}nvPr/{*}ph")
        return place is not None and place.get("type") in ("dt", "ftr", "hdr", "sldNum")
    if name == "numCache":
        return _is_date(element.findtext("{*}formatCode") or "")
    return False


def _name(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def xlsx_text(path: Path) -> str:
    """Return texts and numbers of the cells. Dates are numbers whose form depends on a style: they are left out."""
    with package_of(path) as package:
        names = package.namelist()
        shared = list[str]()
        for name in (n for n in names if n.lower().endswith("sharedstrings.xml")):
            shared = ["".join(_shown(item)) for item in ElementTree.fromstring(package.read(name))]
        styles = next((n for n in names if n.lower().endswith("xl/styles.xml")), None)
        dates = _date_styles(ElementTree.fromstring(package.read(styles))) if styles else set[int]()
        cells, num_characters = list[str](), 0
        for name in (n for n in names if re.fullmatch(r"xl/worksheets/[^/]+\.xml", n)):
            for cell in ElementTree.fromstring(package.read(name)).iterfind(".//{*}c"):
                cells.append(_cell(cell, shared, dates))
                num_characters += len(cells[-1])
                if num_characters > MOST_BYTES:
                    raise NoReference("has too much text")
        drawn = (n for n in names if re.fullmatch(r"xl/(comments\d*|drawings/drawing\d*|charts/chart\d*)\.xml", n))
        return "\n".join(
            cells + ["".join(_shown(ElementTree.fromstring(package.read(name)), _NOT_IN_SHEETS)) for name in drawn]
        )


def _cell(cell: Any, shared: list[str], dates: set[int]) -> str:
    value, kind = cell.findtext("{*}v") or "", cell.get("t", "n")
    if kind == "s":
        return shared[int(value)] if value else ""
    if kind == "inlineStr":
        return "".join(_shown(cell))
    if kind == "b":
        return str(value == "1")
    if kind != "n":
        return "" if kind in ("e", "d") else value
    if not value or int(cell.get("s", 0)) in dates:
        return ""
    return _number(value)


def _number(text: str) -> str:
    """Return a number with at most 15 digits, as spreadsheets show it; any other text unchanged."""
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def xls_text(path: Path) -> str:
    """Return the cells with letters, without errors, of different rows: xls2csv repeats some sheets."""
    rows = csv.reader(io.StringIO(output_of("xls2csv", "-q", "0", "-c", "\t", "-d", "utf-8", str(path))), "excel-tab")
    return "\n".join(
        cell
        for row in dict.fromkeys(map(tuple, rows))
        for cell in row
        if cell != "ERROR" and any(map(str.isalpha, cell))
    )


def ods_text(path: Path) -> str:
    """Return the cells of text."""
    with package_of(path) as package:
        content = ElementTree.fromstring(package.read("content.xml"))
    cells = (cell for cell in content.iterfind(".//{*}table-cell") if "string" in cell.attrib.values())
    return "\n".join("\n".join("".join(line.itertext()) for line in cell.iterfind("{*}p")) for cell in cells)


def _date_styles(styles: Any) -> set[int]:
    codes = {int(f.get("numFmtId")): f.get("formatCode", "") for f in styles.iterfind(".//{*}numFmt")}
    cells = [int(xf.get("numFmtId", 0)) for xf in styles.iterfind("{*}cellXfs/{*}xf")]
    built_in = {*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)}
    return {index for index, number in enumerate(cells) if number in built_in or _is_date(codes.get(number, ""))}


def _is_date(format_code: str) -> bool:
    return bool(re.search("[ymdhs]", re.sub(r'"[^"]*"|\[[^\]]*\]|\\.|general', "", format_code.lower())))
