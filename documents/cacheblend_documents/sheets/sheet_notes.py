"""Comments on the cells of a sheet, and its drawings with text boxes and charts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter

from cacheblend_documents.converter import comment_mark
from cacheblend_documents.office.drawing_text import body_text, resolve_alternatives
from cacheblend_documents.office.drawings import DRAWN, drawn_text
from cacheblend_documents.office.package import OfficePackage, integer, outermost, reporting_damage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.sheets.workbook import string_text

_ROW = re.compile(r"[A-Z]{1,3}(\d{1,7})")


def comments(package: OfficePackage, sheet: str, persons: Mapping[str, str]) -> list[tuple[str, int]]:
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


def drawn_texts(package: OfficePackage, sheet: str, omissions: Omissions, place: str) -> list[str]:
    """Return the texts of the shapes, charts and diagrams that are drawn on a sheet. sheet: name of its part."""
    texts = list[str]()
    for part in package.related(sheet, "drawing"):
        with reporting_damage(omissions, f"the drawings on {place} cannot be read"):
            texts += map(body_text, resolve_alternatives(package.xml(part)).iter("txBody"))
            for relation in package.relations(part).values():
                if (thing := DRAWN.get(relation.kind)) is not None:
                    texts.append(drawn_text(package, relation, thing, omissions, place))
    return list(filter(None, texts))
