"""Walk over the XML of a Word document: paragraphs, lists, tables, fields, notes and equations as blocks of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from cacheblend_documents.equations import equation_text
from cacheblend_documents.inline_marks import (
    LINK,
    LOWERED,
    NOT_STRUCK,
    RAISED,
    STRUCK,
    comment_mark,
    end_of_link,
    shown,
    target_of,
)
from cacheblend_documents.numerals import roman
from cacheblend_documents.office.drawings import drawn_text
from cacheblend_documents.office.package import OfficePackage, Relation, child, integer, outermost
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.symbols import symbol, without_font_codes
from cacheblend_documents.word.alternative_formats import embedded_text
from cacheblend_documents.word.fields import CHECKED, UNCHECKED, Fields, form_value
from cacheblend_documents.word.numbering import Numbering
from cacheblend_documents.word.styles import Style, Styles, is_on, is_struck, outline_level, value_of
from cacheblend_documents.word.tables import Block, Cell, table_blocks

Notes = Mapping[str, Element]
"""Footnotes, endnotes or comments by identifier."""

_DEEPEST = 120  # maximum nesting of elements; deeper text loses its structure
_HEADING = 200  # maximum characters of a heading without a heading style
_PLACE = 40  # maximum characters of a heading as the place of an omission
_SHOWN = frozenset(("w:t", "a:t", "m:t", "c:chart", "chart", "dgm:relIds", "textpath", "w:sym", "docPr"))
_SKIPPED = ("w:pPr", "w:rPr", "w:tblPr", "w:sdtPr", "w:sectPr", "w:del", "w:moveFrom", "w:delText")
_GENERATED = "Description automatically generated"
_FILE = re.compile(r"[\\/]|\.\w{3,4}$")


@dataclass
class _Story:
    """A flow of text: the body, a cell, a text box, a note."""

    blocks: list[Block] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # text of the current paragraph; the part "\n" ends a line
    boxes: list[Block] = field(default_factory=list)  # text boxes of the current paragraph
    fields: Fields = field(default_factory=Fields)


class Walk:
    """Converts elements of a document in order. Lists and notes are numbered over the whole document."""

    def __init__(
        self,
        package: OfficePackage,
        styles: Styles,
        numbering: Numbering,
        notes: Mapping[str, Notes],
        omissions: Omissions,
    ) -> None:
        """notes: notes by kind: "footnote", "endnote", "comment"."""
        self._styles, self._numbering, self._notes, self._omissions = styles, numbering, notes, omissions
        self._package = package
        self._relations: Mapping[str, Relation] = package.relations(package.main)  # of the current part
        self._note_relations = {
            kind: package.relations(name) for kind in notes for name in package.related(package.main, f"{kind}s")[:1]
        }
        self.title = ""
        self._story = _Story()
        self._num_stories = self._depth = 0
        self._style = Style()
        self._font, self._is_hidden = "", False
        self._labels: dict[tuple[str, str], str] = {}  # note -> its mark
        self._counts: dict[str, int] = {}
        self._noted = list[Block]()  # notes and comments for the end of the paragraph or table
        self._initial = list[str]()  # a paragraph of one large letter, which begins the next paragraph
        self._heading = ""
        self._page_words: int | None = None  # words of page numbers in a header or footer; None elsewhere
        self._handlers: dict[str, Callable[[Element], None]] = {
            "w:p": self._paragraph,
            "w:tbl": self._table,
            "w:r": self._run,
            "w:hyperlink": self._hyperlink,
            **dict.fromkeys(("w:t", "a:t"), self._text),
            **dict.fromkeys(("w:tab", "w:ptab"), lambda element: self._add(" ")),
            **dict.fromkeys(("w:br", "w:cr"), lambda element: self._add("\n")),
            "w:noBreakHyphen": lambda element: self._add("-"),
            "w:sym": self._symbol,
            "w:ruby": lambda element: self._visit(element.findall("w:rubyBase")),
            **dict.fromkeys(("m:oMath", "m:oMathPara"), lambda element: self._add(equation_text(element))),
            "w:fldChar": self._field_mark,
            "w:fldSimple": self._simple_field,
            "w:instrText": lambda element: self._story.fields.add_code(element.text or ""),
            "w:ffData": lambda element: self._add(form_value(element)),
            "w:sdt": self._control,
            "w:footnoteReference": lambda element: self._note("footnote", element),
            "w:endnoteReference": lambda element: self._note("endnote", element),
            **dict.fromkeys(("w:commentReference", "w:commentRangeStart"), self._comment),
            "w:txbxContent": lambda element: self._story.boxes.extend(self._separately(element)),
            "textpath": lambda element: self._story.boxes.append(Block(" ".join(element.get("string", "").split()))),
            "docPr": self._picture,
            "mc:AlternateContent": self._alternate,
            **dict.fromkeys(("c:chart", "chart"), lambda element: self._drawing("chart", element.get("r:id", ""))),
            "dgm:relIds": lambda element: self._drawing("diagram", element.get("r:dm", "")),
            "OLEObject": self._object,
            "w:control": lambda element: self._left_out("form control"),
            "w:altChunk": self._embedded_document,
            "w:subDoc": lambda element: self._left_out("linked document"),
            **dict.fromkeys(_SKIPPED, lambda element: None),
        }

    def body(self, elements: Iterable[Element]) -> list[Block]:
        """Convert elements of the body, and return the blocks that are complete."""
        self._visit(elements)
        self._end_paragraph()
        blocks, self._story.blocks = self._story.blocks, []
        return blocks

    def margin(self, name: str) -> str:
        """Return the text of a header or footer, without paragraphs that only have page numbers. Raises DamagedPart."""
        root = self._package.xml(name)
        self._page_words = 0
        blocks = self._separately(root, self._package.relations(name))
        self._page_words = None
        return "\n".join(block.text for block in blocks)

    def _visit(self, elements: Iterable[Element]) -> None:
        self._depth += 1
        for element in elements:
            handler = self._handlers.get(element.tag)
            if self._depth > _DEEPEST:
                self._add(" ".join(inner.text or "" for inner in element.iter("w:t")))
            elif handler is not None:
                handler(element)
            else:
                self._visit(element)
        self._depth -= 1

    def _separately(self, elements: Iterable[Element], relations: Mapping[str, Relation] | None = None) -> list[Block]:
        """Convert a flow of text within another one. relations: those of its part, if that is another one."""
        outer, self._story = self._story, _Story()
        outer_relations = self._relations
        self._relations = outer_relations if relations is None else relations
        self._num_stories += 1
        self._visit(elements)
        self._end_paragraph()
        self._num_stories -= 1
        self._relations = outer_relations
        story, self._story = self._story, outer
        return story.blocks

    # Paragraphs and tables

    def _paragraph(self, element: Element) -> None:
        properties = child(element, "w:pPr")
        story, style = self._story, self._styles.paragraph(value_of(properties, "w:pStyle"))
        story.fields.begin_paragraph()
        outer, self._style = self._style, style
        self._end_paragraph()
        story.parts, self._initial = self._initial, []
        self._visit(element)
        self._style = outer
        mark = child(properties, "w:rPr")
        is_deleted = child(mark, "w:del") is not None or child(mark, "w:moveFrom") is not None
        frame = child(properties, "w:framePr")
        if frame is not None and frame.get("dropCap", "none") != "none":
            story.parts, self._initial = [], story.parts
        elif not is_deleted or any(part.strip() for part in story.parts):
            self._end_paragraph(properties, style)
        self._add_notes()

    def _end_paragraph(self, properties: Element | None = None, style: Style | None = None) -> None:
        """Make a block of the text so far. style: None for text outside of paragraphs, without a number."""
        story = self._story
        if style is None and not story.parts and not story.boxes:
            return
        lines = shown("".join(story.parts)).split("\n")
        text = "\n".join(" ".join(line.split()) for line in lines).strip("\n")
        story.parts = []
        label = None if style is None else self._numbering.next(properties, style)
        if self._page_words is not None:
            if self._page_words and len(re.findall(r"\w+", text)) - self._page_words <= 2:
                text = ""  # "Page 3 of 7"
            self._page_words = 0
        if text and style is not None and style.is_title and not self._num_stories:
            self.title = self.title or " ".join(text.split())
            story.blocks.append(Block(text, 1))
        elif text:
            level = _heading_level(properties, style, text)
            if level and not self._num_stories:
                self._heading = " ".join(text.split())[:_PLACE]
            labelled = text if label is None else f"{label.text} {text}"
            story.blocks.append(Block(labelled, level, None if level or label is None else label.level))
        story.blocks += (box for box in story.boxes if box.text)
        story.boxes = []

    def _table(self, element: Element) -> None:
        self._end_paragraph()
        rows = []
        for row in _found(element, "w:tr"):
            properties = child(row, "w:trPr")
            if child(properties, "w:del") is None:
                before = integer(value_of(properties, "w:gridBefore"))
                rows.append(list(self._cells(row, min(max(before, 0), 1000))))
        self._story.blocks += table_blocks(rows)
        self._add_notes()

    def _cells(self, row: Element, start: int) -> Iterator[Cell]:
        for cell in _found(row, "w:tc"):
            properties = child(cell, "w:tcPr")
            span = min(max(integer(value_of(properties, "w:gridSpan"), 1), 1), 1000)
            merge = child(properties, "w:vMerge")
            is_merged = merge is not None and merge.get("val", "continue") == "continue"
            yield Cell(start, span, is_merged, self._separately(cell))
            start += span

    # Text

    def _run(self, element: Element) -> None:
        properties = child(element, "w:rPr")
        style = self._styles.of(value_of(properties, "w:rStyle"))
        position = value_of(properties, "w:vertAlign")
        is_raised = position == "superscript" if position else style.is_raised
        hidden, struck = is_on(properties, "w:vanish"), is_struck(properties)
        fonts = child(properties, "w:rFonts")
        outer = self._font, self._is_hidden
        self._font = "" if fonts is None else fonts.get("ascii", "")
        self._is_hidden = (style.is_hidden or self._style.is_hidden) if hidden is None else hidden
        first = len(self._story.parts)
        self._visit(element)
        self._font, self._is_hidden = outer
        parts = self._story.parts[first:]
        if is_raised and parts:
            parts = [RAISED, *parts, LOWERED]
        if parts and ((style.is_struck or self._style.is_struck) if struck is None else struck):
            parts = [STRUCK, *parts, NOT_STRUCK]
        self._story.parts[first:] = parts

    def _add(self, text: str) -> None:
        """Add text to the paragraph, unless it is hidden or part of a field's code."""
        story = self._story
        if not text or story.fields.is_code:
            return
        if self._is_hidden:
            if text.strip():
                self._omissions.say("hidden text")
            return
        if self._page_words is not None and story.fields.is_page_number:
            self._page_words += len(text.split())
        story.parts.append(text)

    def _text(self, element: Element) -> None:
        text = without_font_codes(element.text or "", self._font)
        self._add(text.replace("\n", " ").replace("\xad", ""))

    def _symbol(self, element: Element) -> None:
        with suppress(ValueError):
            self._add(symbol(element.get("font", ""), int(element.get("char", ""), 16)))

    # Fields and controls

    def _field_mark(self, element: Element) -> None:
        fields, kind = self._story.fields, element.get("fldCharType")
        if kind == "begin":
            fields.begin()
            self._visit(element)
        elif kind == "separate":
            fields.separate()
            self._mark_link(fields.link, LINK)
        elif kind == "end":
            self._mark_link(fields.link, end_of_link(fields.link))
            if fields.end() == "EQ":
                self._left_out("equation")

    def _simple_field(self, element: Element) -> None:
        fields = self._story.fields
        fields.begin(element.get("instr", ""), has_result=True)
        self._linked(element, fields.link)
        fields.end()

    def _hyperlink(self, element: Element) -> None:
        relation, place = self._relations.get(element.get("r:id", "")), element.get("anchor", "")
        address = "" if relation is None else f"{relation.target}#{place}" if place else relation.target
        self._linked(element, target_of(address))

    def _linked(self, element: Element, target: str) -> None:
        self._mark_link(target, LINK)
        self._visit(element)
        self._mark_link(target, end_of_link(target))

    def _mark_link(self, target: str, mark: str) -> None:
        if target and not (self._is_hidden or self._story.fields.is_code):
            self._story.parts.append(mark)

    def _control(self, element: Element) -> None:
        box = child(element, "w:sdtPr", "checkbox")
        if box is None:
            self._visit(element)
        else:
            self._add(CHECKED if is_on(box, "checked") else UNCHECKED)

    # Notes and objects

    def _note(self, kind: str, element: Element) -> None:
        name = element.get("id", "")
        note, label = self._notes[kind].get(name), self._labels.get((kind, name), "")
        if note is None:
            return
        if not label:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            label = self._labels[kind, name] = str(number) if kind == "footnote" else roman(number)
            self._noted.append(Block(f"[^{label}]: {_joined(self._note_blocks(kind, note))}"))
        self._add(f"[^{label}]")

    def _comment(self, element: Element) -> None:
        name = element.get("id", "")
        note = self._notes["comment"].get(name)
        if note is not None and ("comment", name) not in self._labels:
            self._labels["comment", name] = name
            if text := _joined(self._note_blocks("comment", note)):
                self._noted.append(Block(comment_mark(note.get("author", "")) + text))

    def _note_blocks(self, kind: str, note: Element) -> list[Block]:
        return self._separately(note, self._note_relations[kind])

    def _add_notes(self) -> None:
        if not self._num_stories:
            self._story.blocks += self._noted
            self._noted = []

    def _picture(self, element: Element) -> None:
        """Add the description of a picture, unless it is a file name."""
        text = " ".join(element.get("descr", "").partition(_GENERATED)[0].split())
        if " " in text and self._page_words is None and not _FILE.search(text):
            self._add(f" [picture: {text}] ")

    def _alternate(self, element: Element) -> None:
        """Visit the first alternative with content: newer applications and older ones see the same text."""
        for choice in element:
            if any(inner.tag in _SHOWN for inner in choice.iter()):
                self._visit(choice)
                break

    def _object(self, element: Element) -> None:
        is_equation = element.get("ProgID", "").startswith("Equation")
        self._left_out("equation" if is_equation else "embedded object")

    def _embedded_document(self, element: Element) -> None:
        self._end_paragraph()
        relation = self._relations.get(element.get("r:id", ""))
        if text := embedded_text(self._package, relation, self._omissions, self._heading):
            self._story.blocks.append(Block(text))

    def _drawing(self, thing: str, relation: str) -> None:
        if self._is_hidden:
            self._left_out(thing)
            return
        text = drawn_text(self._package, self._relations.get(relation), thing, self._omissions, self._heading)
        if text:
            self._story.boxes.append(Block(text))

    def _left_out(self, thing: str) -> None:
        self._omissions.add(thing, self._heading)


def _joined(blocks: Iterable[Block]) -> str:
    return " ".join(" ".join(block.text for block in blocks).split())


def _heading_level(properties: Element | None, style: Style | None, text: str) -> int:
    outline = value_of(properties, "w:outlineLvl")
    if outline:
        level = outline_level(outline)
        return level if len(text) <= _HEADING or (style is not None and style.level) else 0
    return 0 if style is None else style.level


def _found(parent: Element, tag: str) -> Iterator[Element]:
    """Yield the rows of a table or the cells of a row, also those in controls, but not those of inner tables."""
    found = outermost(parent, tag, "w:tbl", "w:p", "w:tc", "w:del", "w:moveFrom")
    return (element for element in found if element.tag == tag)
