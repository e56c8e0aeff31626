"""Styles of a Word document, with what they inherit: headings, list numbering, hidden and struck-out text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from cacheblend_documents.office.package import child, integer

_HEADING = re.compile(r"heading ?([1-9])", re.IGNORECASE)
_OFF = frozenset(("0", "false", "off", "none"))


def is_on(parent: Element | None, name: str) -> bool | None:
    """Return a switch such as <w:vanish/>, None if it is missing."""
    found = child(parent, name)
    return None if found is None else found.get("val", "1") not in _OFF


def is_struck(run: Element | None) -> bool | None:
    """Return whether run properties strike the text out, with one line or two; None if they do not say."""
    switches = [is_on(run, name) for name in ("w:strike", "w:dstrike")]
    return None if switches == [None, None] else any(switches)


def value_of(parent: Element | None, *names: str) -> str:
    """Return the value of the property on a path of names, "" if it is missing."""
    found = child(parent, *names)
    return "" if found is None else found.get("val", "")


@dataclass(frozen=True)
class Style:
    """Properties of a style, with those that it inherits."""

    level: int = 0  # of a heading, from 1; 0 is body text
    is_title: bool = False
    num_id: str = ""  # list, see Numbering
    num_level: int | None = None
    num_style: str = ""  # identifier of the style that names the list
    is_raised: bool = False  # superscript
    is_hidden: bool = False
    is_struck: bool = False


class Styles:
    """Styles by identifier."""

    def __init__(self, root: Element | None) -> None:
        """root: w:styles; None if the document has none."""
        self._elements: dict[str, Element] = {}
        self._default = ""
        for element in () if root is None else root.findall("w:style"):
            name = element.get("styleId", "")
            self._elements[name] = element
            if element.get("type") == "paragraph" and element.get("default", "0") not in _OFF:
                self._default = name
        self._known: dict[str, Style] = {"": Style()}

    def paragraph(self, name: str) -> Style:
        """Return the style of a paragraph. name: "" stands for the document's default."""
        return self.of(name if name in self._elements else name or self._default)

    def of(self, name: str) -> Style:
        """Return a style; an unknown one inherits nothing, but may be called "Heading1"."""
        chain = list[str]()
        while name not in self._known:
            chain.append(name)
            self._known[name] = Style()  # ends a circle
            name = value_of(self._elements.get(name), "w:basedOn")
        style = self._known[name]
        for name in reversed(chain):
            style = self._known[name] = self._derived(name, style)
        return style

    def _derived(self, name: str, base: Style) -> Style:
        element = self._elements.get(name)
        called = value_of(element, "w:name") or name
        paragraph, run = child(element, "w:pPr"), child(element, "w:rPr")
        style = replace(base, is_title=called.lower() == "title")
        if heading := _HEADING.fullmatch(called):
            style = replace(style, level=int(heading[1]))
        elif outline := value_of(paragraph, "w:outlineLvl"):
            style = replace(style, level=outline_level(outline))
        if num_id := value_of(paragraph, "w:numPr", "w:numId"):
            style = replace(style, num_id=num_id, num_style=name, num_level=None)
        if num_level := value_of(paragraph, "w:numPr", "w:ilvl"):
            style = replace(style, num_level=integer(num_level))
        if position := value_of(run, "w:vertAlign"):
            style = replace(style, is_raised=position == "superscript")
        if (hidden := is_on(run, "w:vanish")) is not None:
            style = replace(style, is_hidden=hidden)
        if (struck := is_struck(run)) is not None:
            style = replace(style, is_struck=struck)
        return style


def outline_level(value: str) -> int:
    """Return the heading level for a w:outlineLvl, in which 9 stands for body text."""
    number = integer(value, 9)
    return number + 1 if 0 <= number < 9 else 0
