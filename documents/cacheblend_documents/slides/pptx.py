"""Presentations: the text of each slide in reading order, with tables, charts, diagrams, notes and comments."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from xml.etree.ElementTree import Element

from cacheblend_documents.converted import Converted, Mark, NotConverted, joined, shortened
from cacheblend_documents.inline_marks import LINK, comment_mark, end_of_link, shown
from cacheblend_documents.office.drawing_text import (
    body_text,
    resolve_alternatives,
    resolve_links,
    table_text,
)
from cacheblend_documents.office.drawings import drawn_text
from cacheblend_documents.office.package import (
    DamagedPart,
    OfficePackage,
    Relation,
    child,
    integer,
    outermost,
    reporting_damage,
)
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.slides.reading_order import Box, reading_order

_SHAPES = frozenset(("p:sp", "p:graphicFrame", "p:grpSp"))
_TITLES = frozenset(("title", "ctrTitle"))
_FOOTERS = frozenset(("ftr", "dt", "hdr", "sldNum"))
_DEEPEST = 16  # groups inside groups whose shapes are put in reading order
_SLIDE = re.compile(r"ppt/slides/slide(\d{1,9})\.xml")
_FRAMES = {"c:chart": "chart", "chart": "chart", "dgm:relIds": "diagram"}
"""Content of a graphic frame -> name of what is drawn."""


def from_pptx(data: bytes) -> Converted:
    return _Presentation(OfficePackage(data, "a presentation")).converted()


class _Presentation:
    """Slides of a package, with the footers and omissions found so far."""

    def __init__(self, package: OfficePackage) -> None:
        self._package = package
        self._main = package.main
        self._omissions = Omissions()
        self._footers = set[str]()
        self._placeholders: dict[str, dict[str, Box]] = {}  # layout or master -> its placeholders

    def converted(self) -> Converted:
        parts = list[tuple[str, Mark]]()
        names = self._slides()
        for slide, name in enumerate(names, 1):
            with reporting_damage(self._omissions, f"slide {slide} cannot be read"):
                text = "\n\n".join(filter(None, self._texts(name, f"slide {slide}")))
                parts.append((text, Mark(0, f"slide {slide}")))
        if names and not parts:
            raise NotConverted("not a presentation: no slide can be read", "damaged or locked")
        return joined(parts, "markdown", omissions=self._omissions)

    def _slides(self) -> list[str]:
        """Return the parts of the slides in order; "" for a missing one."""
        with suppress(DamagedPart):
            root, relations = self._package.xml(self._main), self._package.relations(self._main)
            if root.tag != "p:presentation":
                raise NotConverted("not a presentation", "damaged or locked")
            if relations:
                identifiers = dict.fromkeys(slide.get("r:id", "") for slide in root.iter("p:sldId"))
                targets = dict.fromkeys(relations[one].target if one in relations else one for one in identifiers)
                return [target if target in self._package else "" for target in targets]
        self._omissions.say("the order of the slides is unknown")
        found = {int(match[1]): name for name in self._package.names if (match := _SLIDE.fullmatch(name))}
        return [name for _, name in sorted(found.items())]

    def _texts(self, name: str, place: str) -> Iterator[str]:
        """Yield the texts of a slide, the title first. Raises DamagedPart if it cannot be read."""
        tree = child(self._read(name), "p:cSld", "p:spTree")
        if tree is None:
            raise DamagedPart(name)
        slide = _Slide(self._package, self._package.relations(name), self._boxes(name), self._omissions, place)
        for shape in tree.iter("p:sp"):
            if _kind(shape) in _TITLES and (title := slide.text(shape)):
                yield "# " + " ".join(title.split())
                shape.clear()
                break
        yield from slide.texts(tree)
        for shape in tree.iter("p:sp"):
            if _kind(shape) in _FOOTERS and (text := _footer(shape)) and text not in self._footers:
                self._footers.add(text)
                yield f"Footer: {text}"
        yield from self._notes(name, place)
        yield from self._comments(name, place)

    def _read(self, part: str) -> Element:
        """Parse a part. Raises DamagedPart."""
        return resolve_links(resolve_alternatives(self._package.xml(part)), self._package.relations(part))

    def _boxes(self, slide: str) -> Mapping[str, Box]:
        """Return the boxes of the placeholders of the slide's layout and master."""
        layouts = self._package.related(slide, "slideLayout")[:1]
        masters = [master for layout in layouts for master in self._package.related(layout, "slideMaster")[:1]]
        return ChainMap(*map(self._boxes_of, (*layouts, *masters)))

    def _boxes_of(self, part: str) -> dict[str, Box]:
        """Return the boxes of the placeholders of a layout or master."""
        if part not in self._placeholders:
            found = self._placeholders[part] = {}
            with suppress(DamagedPart):
                for shape in self._package.xml(part).iter("p:sp"):
                    if (box := _own_box(shape)) is not None:
                        found |= dict.fromkeys(_names(shape), box)
        return self._placeholders[part]

    def _notes(self, slide: str, place: str) -> Iterator[str]:
        for part in self._package.related(slide, "notesSlide"):
            try:
                root = self._read(part)
                shapes = [s for s in root.iter("p:sp") if _kind(s) not in _FOOTERS]
                text = "\n".join(filter(None, map(_body, shapes)))
                yield f"Notes: {text}" if text else ""
            except DamagedPart:
                self._omissions.add("page of notes", place, plural="pages of notes")

    def _comments(self, slide: str, place: str) -> Iterator[str]:
        for part in self._package.related(slide, "comments"):
            try:
                root = self._read(part)
            except DamagedPart:
                self._omissions.add("list of comments", place, plural="lists of comments")
                continue
            for element in root.iter():
                kind = {"cm": "Comment", "reply": "Reply"}.get(element.tag.rpartition(":")[2])
                texts = [element.findtext("p:text", "").strip(), *map(body_text, element.findall("txBody"))]
                if kind and any(texts):
                    author = self._authors.get(element.get("authorId", ""), "")
                    yield comment_mark(author, kind) + "\n".join(filter(None, texts))

    @cached_property
    def _authors(self) -> dict[str, str]:
        """Names of the authors of comments by identifier."""
        authors = dict[str, str]()
        for kind in ("commentAuthors", "authors"):
            for part in self._package.related(self._main, kind):
                with suppress(DamagedPart):
                    elements = self._package.xml(part).iter()
                    authors |= {element.get("id", ""): shortened(element.get("name", "")) for element in elements}
        return authors


@dataclass
class _Slide:
    """Shapes of a slide as text."""

    package: OfficePackage
    relations: dict[str, Relation]
    boxes: Mapping[str, Box]  # of the placeholders that the slide inherits
    omissions: Omissions
    place: str  # of the slide, for omissions

    def texts(self, container: Element, depth: int = 0) -> list[str]:
        """Return the texts of the shapes in reading order; in document order if the place of one is unknown."""
        found = list[tuple[str, Box | None]]()
        for shape in container:
            if shape.tag in _SHAPES and _kind(shape) not in _FOOTERS:
                text = self._group(shape, depth) if shape.tag == "p:grpSp" else self.text(shape)
                if text:
                    found.append((text, self._box(shape)))
        texts, boxes = [text for text, _ in found], [box for _, box in found if box is not None]
        return [texts[i] for i in reading_order(boxes)] if len(boxes) == len(texts) else texts

    def _group(self, group: Element, depth: int) -> str:
        if depth < _DEEPEST:
            return "\n\n".join(self.texts(group, depth + 1))
        return "\n\n".join(filter(None, map(self.text, outermost(group, "p:sp", "p:graphicFrame"))))

    def text(self, shape: Element) -> str:
        """Return the text of a shape or graphic frame; "" for a group."""
        if shape.tag == "p:sp":
            return _body(shape)
        return "\n\n".join(filter(None, self._frame(shape))) if shape.tag == "p:graphicFrame" else ""

    def _frame(self, frame: Element) -> Iterator[str]:
        for table in outermost(frame, "a:tbl"):
            yield table_text(table)
        for element in frame.iter():
            if element.tag == "p:oleObj":
                self.omissions.add("embedded object", self.place)
            elif (thing := _FRAMES.get(element.tag)) is not None:
                relation = self.relations.get(element.get("r:id") or element.get("r:dm") or "")
                yield drawn_text(self.package, relation, thing, self.omissions, self.place)

    def _box(self, shape: Element) -> Box | None:
        return _own_box(shape) or next((self.boxes[name] for name in _names(shape) if name in self.boxes), None)


def _placeholder(shape: Element) -> Element | None:
    return child(shape, "p:nvSpPr", "p:nvPr", "p:ph")


def _kind(shape: Element) -> str:
    """Return the kind of a placeholder; "" for other shapes."""
    found = _placeholder(shape)
    return "" if found is None else found.get("type", "obj")


def _names(shape: Element) -> list[str]:
    """Return the keys of a placeholder in its layout and master: its index, then its kind."""
    found = _placeholder(shape)
    if found is None:
        return []
    kind = {"ctrTitle": "title", "subTitle": "body", "obj": "body"}.get(_kind(shape), _kind(shape))
    return [f"index {found.get('idx')}", kind] if found.get("idx") else [kind]


def _own_box(shape: Element) -> Box | None:
    paths = (("p:spPr", "a:xfrm"), ("p:xfrm",), ("p:grpSpPr", "a:xfrm"))
    frame = next((found for path in paths if (found := child(shape, *path)) is not None), None)
    offset, extent = child(frame, "a:off"), child(frame, "a:ext")
    if offset is None or extent is None:
        return None
    width, height = (max(0, integer(extent.get(name))) for name in ("cx", "cy"))
    return integer(offset.get("x")), integer(offset.get("y")), width, height


def _body(shape: Element) -> str:
    body, link = shape.find("p:txBody"), child(shape, "p:nvSpPr", "p:cNvPr", "a:hlinkClick")
    text = "" if body is None else body_text(body)
    return text if link is None else shown(f"{LINK}{text}{end_of_link(link.get('target', ''))}")


def _footer(shape: Element) -> str:
    """Return the text of a footer; "" for a date that changes."""
    changes = _kind(shape) == "dt" and next(shape.iter("a:fld"), None) is not None
    return "" if changes else " ".join(_body(shape).split())
