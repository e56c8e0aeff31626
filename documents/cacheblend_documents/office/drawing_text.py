"""DrawingML text bodies and tables of Office files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from cacheblend_documents.converted import shortened
from cacheblend_documents.equations import equation_text
from cacheblend_documents.inline_marks import LINK, LOWERED, NOT_STRUCK, RAISED, STRUCK, end_of_link, shown, target_of
from cacheblend_documents.numerals import repeated_letter, roman
from cacheblend_documents.office.package import Relation, integer, outermost

_DEEPEST_LEVEL = 8  # of a list


def resolve_alternatives(root: Element) -> Element:
    """Replace each mc:AlternateContent below root by its first choice, else its fallback, and return root."""
    waiting = [root]
    while waiting:
        element = waiting.pop()
        if any(child.tag == "mc:AlternateContent" for child in element):
            element[:] = [chosen for child in element for chosen in _chosen(child)]
        waiting += element
    return root


def _chosen(element: Element) -> Iterator[Element]:
    """Yield the children of the branch to read. Alternatives directly inside of alternatives are resolved too."""
    waiting = [element]
    while waiting:
        found = waiting.pop()
        if found.tag == "mc:AlternateContent":
            branch = next((b for b in found if b.tag == "mc:Choice" and len(b)), found.find("mc:Fallback"))
            waiting += reversed(branch if branch is not None else [])
        else:
            yield found


def resolve_links(root: Element, relations: Mapping[str, Relation]) -> Element:
    """Set the attribute `target` of each link below root, and return root. relations: those of its part."""
    for link in root.iter("a:hlinkClick"):
        relation = relations.get(link.get("r:id", ""))
        link.set("target", "" if relation is None else target_of(relation.target))
    return root


def body_text(body: Element) -> str:
    """Return the paragraphs of a text body, one a line, with list numbers. Slide numbers are left out."""
    numbers, lines = _ListNumbers(), list[str]()
    for paragraph in outermost(body, "a:p"):
        if text := paragraph_text(paragraph):
            lines.append(numbers.next(paragraph.find("a:pPr")) + text)
    return "\n".join(lines)


def paragraph_text(paragraph: Element) -> str:
    """Return the text of a paragraph; superscripts as in 10^6, line breaks as line ends."""
    lines = shown("".join(map(_marked, paragraph))).split("\n")
    return "\n".join(filter(None, map(str.strip, lines)))


def _marked(child: Element) -> str:
    """Return the text of a child of a paragraph. It is marked if it is raised, struck out or a link."""
    text = _inline(child)
    properties = child.find("a:rPr") if text.strip() else None
    if properties is None:
        return text
    if integer(properties.get("baseline", "").rstrip("%")) > 0:
        text = f"{RAISED}{text}{LOWERED}"
    if properties.get("strike", "noStrike") != "noStrike":
        text = f"{STRUCK}{text}{NOT_STRUCK}"
    link = properties.find("a:hlinkClick")
    target = "" if link is None else link.get("target", "")
    return f"{LINK}{text}{end_of_link(target)}" if target else text


def _inline(element: Element) -> str:
    """Return the text of a child of a paragraph. a14:m has equations, and its namespace no prefix."""
    if element.tag in ("m", "m:oMath", "m:oMathPara"):
        return equation_text(element)
    if element.tag == "a:br":
        return "\n"
    if element.tag not in ("a:r", "a:fld") or element.get("type") == "slidenum":
        return ""
    return "".join(t.text or "" for t in element.findall("a:t"))


class _ListNumbers:
    """Numbers of automatically numbered paragraphs of a text body."""

    def __init__(self) -> None:
        self._counts = dict[int, tuple[int, str]]()  # level -> number and kind of the last paragraph

    def next(self, properties: Element | None) -> str:
        """Return the number before a paragraph with a blank after it, "" without."""
        level = 0 if properties is None else max(0, min(integer(properties.get("lvl")), _DEEPEST_LEVEL))
        automatic = None if properties is None else properties.find("a:buAutoNum")
        last = self._counts.get(level)
        self._counts = {above: count for above, count in self._counts.items() if above < level}
        if automatic is None:
            return ""
        kind = automatic.get("type", "arabicPeriod")
        count = last[0] + 1 if last is not None and last[1] == kind else integer(automatic.get("startAt"), 1)
        self._counts[level] = count, kind
        return _list_number(count, kind) + " "


def _list_number(count: int, kind: str) -> str:
    if kind.startswith("alpha"):
        shown = repeated_letter(count)
    else:
        shown = roman(count) if kind.startswith("roman") else str(count)
    shown = shown.upper() if "Uc" in kind else shown
    end = "." if kind.endswith("Period") else ")" if "Paren" in kind else ""
    return f"({shown})" if kind.endswith("ParenBoth") else shown + end


def table_text(table: Element) -> str:
    """Return the rows of an a:tbl, one a line. Merged cells repeat their value."""
    lines, above = list[str](), list[str]()
    for row in outermost(table, "a:tr"):
        cells = list[str]()
        for place, cell in enumerate(row.findall("a:tc")):
            if cell.get("hMerge") in ("1", "true") and cells:
                cells.append(shortened(cells[-1]))
            elif cell.get("vMerge") in ("1", "true") and place < len(above):
                cells.append(shortened(above[place]))
            else:
                cells.append(" ".join(body_text(cell).split()))
        above = cells
        if any(cells):
            lines.append(" | ".join(cells))
    return "\n".join(lines)
