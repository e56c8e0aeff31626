"""Comments on the cells of a sheet, and its drawings with text boxes and charts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cacheblend_cli.corpus.converters.office.drawing_text import body_text, resolve_alternatives
from cacheblend_cli.corpus.converters.office.drawings import DRAWN, drawn_text
from cacheblend_cli.corpus.converters.office.package import DamagedPart, OfficePackage, outermost
from cacheblend_cli.corpus.converters.omissions import Omissions
from cacheblend_cli.corpus.converters.sheets.workbook import string_text

_ROW = re.compile(r"[A-Z]{1,3}(\d{1,7})")


def comments(package: OfficePackage, sheet: str, persons: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return (row number, "Comment on B4 by Mara: Only until May") of the comments on a sheet, by row.

    sheet: name of its part. persons: identifier -> name. Raises DamagedPart.
    """
    found = list[tuple[str, str, str]]()  # cell, author, text
    for part in package.related(sheet, "threadedComment"):
        for element in package.xml(part).iter("threadedComment"):
            author = persons.get(element.get("personId", ""), "")
            found.append((element.get("ref", ""), author, element.findtext("text") or ""))
    threaded = {cell for cell, _, _ in found}
    for part in package.related(sheet, "comments"):
        root = package.xml(part)
        authors = [author.text or "" for author in root.iter("x:author")]
        for element in outermost(root, "x:comment"):
            number, cell = element.get("authorId", ""), element.get("ref", "")
            author = (
                authors[int(number)] if number.isdecimal() and len(number) < 9 and int(number) < len(authors) else ""
            )
            if cell not in threaded:  # else a copy for old programs
                found.append((cell, author, string_text(element).removeprefix(f"{author}:")))
    numbered = [(int(m[1]) if (m := _ROW.fullmatch(cell)) else 0, (cell, author, text)) for cell, author, text in found]
    return [(row, line) for row, parts in sorted(numbered, key=lambda item: item[0]) if (line := _line(*parts))]


def _line(cell: str, author: str, text: str) -> str:
    by = f" by {' '.join(author.split())}" if author.strip() else ""
    return f"Comment on {cell}{by}: {' '.join(text.split())}" if text.strip() else ""


def drawn_texts(package: OfficePackage, sheet: str, omissions: Omissions, place: str) -> list[str]:
    """Return the texts of the shapes, charts and diagrams that are drawn on a sheet. sheet: name of its part."""
    texts = list[str]()
    for part in package.related(sheet, "drawing"):
        try:
            root = package.xml(part)
        except DamagedPart:
            omissions.say(f"the drawings on {place} cannot be read")
            continue
        resolve_alternatives(root)
        texts += map(body_text, root.iter("txBody"))
        for relation in package.relations(part).values():
            if (thing := DRAWN.get(relation.kind)) is not None:
                texts.append(drawn_text(package, relation, thing, omissions, place))
    return list(filter(None, texts))
