"""Elements of a page to Markdown, in one pass without recursion."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from selectolax.lexbor import LexborNode

from cacheblend_documents.equations import formula_text
from cacheblend_documents.inline_marks import LINK, NOT_STRUCK, STRUCK, end_of_link, shown, superscript, target_of
from cacheblend_documents.numerals import ListNumbers
from cacheblend_documents.web.tables import BETWEEN_CELLS, Cell, table_text

ElementWriter = Iterator[None]
"""Generator that writes an element. It yields once, where the children belong, or never to leave them out."""

_BLOCKS = frozenset(
    "address article blockquote body caption center dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 header "
    "hgroup hr html legend li listing main ol optgroup p plaintext pre section summary table tbody td tfoot th thead tr ul xmp".split()
)
_LONG_FORM = 200  # characters of text, besides labels, from which a form is a part of the page
_FILLED_FORM = 2  # filled fields from which a form is a record
_LARGE_FORM = 0.3  # share of the page's text from which a form is the page
_STRUCK = frozenset(("s", "strike", "del"))
_STRUCK_STYLE = '[style*="line-through" i]'
_TEXT_FIELDS = frozenset("text email tel url number date datetime-local time month week color range".split())
_UNSEEN_FIELDS = frozenset("hidden submit button image reset".split())
_MOST_OF_SITE = 50  # links to one site; a page with more is an index or has a menu
_SITE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_MOST_NESTED = 60  # lists, tables and forms within each other; deeper ones are written as paragraphs
_INVISIBLE = dict.fromkeys(map(ord, "\xad\u200b\u2060\ufeff")) | {ord(BETWEEN_CELLS): " ", 0: " "}


@dataclass
class _Form:
    """Counts of one form."""

    num_characters: int = 0  # text besides labels
    num_filled: int = 0  # text fields with a value
    num_fields: int = 0


class _LinkTargets:
    """Targets of the links of a page, except those to a site that it links to very often."""

    def __init__(self, root: LexborNode) -> None:
        self._counts = Counter(_site(_target(node)) for node in root.css("a[href]"))

    def of(self, node: LexborNode) -> str:
        """Return the target of an <a>, "" if it is not to be shown."""
        target = _target(node)
        return target if self._counts[_site(target)] <= _MOST_OF_SITE else ""


def _target(node: LexborNode) -> str:
    return target_of(node.attributes.get("href") or "")


def _site(target: str) -> str:
    """Return the host of a web address, else the target itself."""
    found = _SITE.match(target)
    return found[1].lower() if found else target


def markdown_of(root: LexborNode, num_characters: int) -> str:
    """Return the content of an element as Markdown. num_characters: length of the page's text."""
    writer, node = _Writer(root, num_characters), root.first_child
    waiting: list[tuple[LexborNode, ElementWriter]] = []
    while node is not None or waiting:
        if node is None:  # the end of an element
            node, element = waiting.pop()
            next(element, None)
        elif node.is_text_node:
            writer.write(node.text_content or "")
        elif node.is_element_node:
            element = writer.element(node)
            if next(element, writer) is None:
                waiting.append((node, element))
                node = node.first_child
                continue
        node = node.next
    return writer.finish()


class _Writer:
    """Collects paragraphs. Blocks end with an empty line, items and rows with a line end."""

    def __init__(self, root: LexborNode, num_characters: int) -> None:
        self._page = num_characters
        self._targets = _LinkTargets(root)
        self._struck = {node.mem_id for node in root.css(_STRUCK_STYLE)}
        self._pieces: list[list[str]] = [[]]  # finished paragraphs of the open items, cells, tables, ...
        self._inline = list[str]()  # the current paragraph
        self._paragraph = 0  # its number
        self._num_written = 0  # texts of the page
        self._image = ""  # alternative text of the last image
        self._preformatted = self._marked = self._in_label = self._num_struck = 0  # open elements
        self._numbers: list[ListNumbers | None] = []  # of the open lists
        self._tables = list[list[list[Cell]]]()
        self._forms = list[_Form]()

    def write(self, text: str) -> None:
        """Add a text of the page. Line ends of the source become blanks, except in preformatted text."""
        if not text.isascii() or BETWEEN_CELLS in text:
            text = text.translate(_INVISIBLE)
        if not self._preformatted:
            text = text.replace("\n", " ")
        if not text:
            return
        self._inline.append(text)
        if not text.isspace():
            self._num_written += 1
            if self._forms and not self._in_label:
                self._forms[-1].num_characters += len(text)

    def element(self, node: LexborNode) -> ElementWriter:
        tag = node.tag or ""
        is_too_deep = tag in _NESTING and len(self._pieces) > _MOST_NESTED
        if (write := _ELEMENTS.get(tag)) is not None and not is_too_deep:
            element = write(self, node)
        else:
            element = self._block() if tag in _BLOCKS else iter((None,))
        return self._struck_out(element) if tag in _STRUCK or node.mem_id in self._struck else element

    def finish(self) -> str:
        self._end_paragraph()
        return "".join(self._pieces[0]).replace(BETWEEN_CELLS, " | ")

    def _struck_out(self, element: ElementWriter) -> ElementWriter:
        self._inline += [STRUCK] * (not self._num_struck)
        self._num_struck += 1
        yield from element
        self._num_struck -= 1
        self._inline += [NOT_STRUCK] * (not self._num_struck)

    def _ended_paragraph(self) -> str:
        """Return the current paragraph and begin another one."""
        text = shown("".join(self._inline))
        self._inline = [STRUCK] if self._num_struck else []
        self._paragraph += 1
        return text

    def _end_paragraph(self) -> None:
        lines = self._ended_paragraph().split("\n")
        text = "\n".join(" ".join(line.split()) for line in lines).strip("\n")
        if text:
            self._pieces[-1].append(text + "\n\n")

    @contextmanager
    def _apart(self) -> Iterator[list[str]]:
        """Collect the paragraphs of an element, to write them afterwards."""
        self._end_paragraph()
        pieces = list[str]()
        self._pieces.append(pieces)
        yield pieces
        self._end_paragraph()
        self._pieces.pop()

    def _block(self) -> ElementWriter:
        self._end_paragraph()
        yield
        self._end_paragraph()

    def _heading(self, node: LexborNode) -> ElementWriter:
        before, self._image = self._num_written, ""
        with self._apart() as pieces:
            yield
            if self._num_written == before:
                self.write(self._image)
        if title := " ".join("".join(pieces).replace(BETWEEN_CELLS, " ").split()):
            self._pieces[-1].append(f"{'#' * int((node.tag or '')[1])} {title}\n\n")

    def _code_block(self, node: LexborNode) -> ElementWriter:
        self._end_paragraph()
        self._preformatted += 1
        yield
        self._preformatted -= 1
        code = self._ended_paragraph().strip("\n")
        fence = "```" if "```" not in code else "~~~~"
        if code.strip():
            self._pieces[-1].append(f"{fence}\n{code}\n{fence}\n\n")

    def _list(self, node: LexborNode) -> ElementWriter:
        num_items = sum(child.tag == "li" for child in node.iter())
        self._numbers.append(ListNumbers.of(node.attributes, num_items) if node.tag == "ol" else None)
        yield from self._block()
        self._numbers.pop()
        self._pieces[-1].append("\n")

    def _item(self, node: LexborNode) -> ElementWriter:
        numbers = self._numbers[-1] if self._numbers else None
        mark = numbers.next(node.attributes.get("value")) if numbers is not None else "-"
        with self._apart() as pieces:
            yield
        if item := "".join(pieces).strip("\n"):
            self._pieces[-1].append(f"{mark} " + re.sub(r"\n+", "\n  ", item) + "\n")

    def _term(self, node: LexborNode) -> ElementWriter:
        with self._apart() as pieces:
            yield
        if pieces:
            self._pieces[-1].append("".join(pieces).rstrip("\n") + "\n")

    def _table(self, node: LexborNode) -> ElementWriter:
        rows = list[list[Cell]]()
        self._tables.append(rows)
        with self._apart() as pieces:
            yield
        self._tables.pop()
        self._pieces[-1] += [*pieces, table_text(rows)]

    def _row(self, node: LexborNode) -> ElementWriter:
        self._tables[-1].append([])
        yield from self._block()

    def _cell(self, node: LexborNode) -> ElementWriter:
        with self._apart() as pieces:
            yield
        text = "".join(pieces).strip("\n")
        self._tables[-1][-1].append(Cell(text, _span(node, "colspan", 1000), _span(node, "rowspan", 65534)))

    def _form(self, node: LexborNode) -> ElementWriter:
        """Write a form that is a part of the page, instead of a log-in, a search or a way to contact somebody."""
        self._forms.append(form := _Form())
        with self._apart() as pieces:
            yield
        self._forms.pop()
        is_long = form.num_characters >= _LONG_FORM or sum(map(len, pieces)) >= _LARGE_FORM * self._page
        if is_long or form.num_filled >= _FILLED_FORM or not form.num_fields:
            self._pieces[-1] += pieces

    def _label(self, node: LexborNode) -> ElementWriter:
        self._in_label += 1
        yield
        self._in_label -= 1

    def _input(self, node: LexborNode) -> ElementWriter:
        kind, form = (node.attributes.get("type") or "text").lower(), self._forms[-1] if self._forms else None
        if form is not None and kind not in _UNSEEN_FIELDS:
            form.num_fields += 1
        if kind in ("checkbox", "radio") and (form is not None or self._is_at_start_of_item()):
            self.write("[x] " if "checked" in node.attributes else "[ ] ")
        elif form is not None and kind in _TEXT_FIELDS and (value := (node.attributes.get("value") or "").strip()):
            form.num_filled += 1
            self.write(f" {value} ")
        return iter(())

    def _is_at_start_of_item(self) -> bool:
        return (
            bool(self._numbers)
            and not self._pieces[-1]
            and len(self._pieces) > 1
            and not shown("".join(self._inline)).strip()
        )

    def _select(self, node: LexborNode) -> ElementWriter:
        """Write the selected options of a form's list."""
        if not self._forms:
            return
        self._forms[-1].num_fields += 1
        self.write(" ")
        yield
        self.write(" ")

    def _text_area(self, node: LexborNode) -> ElementWriter:
        if self._forms:
            self._forms[-1].num_fields += 1
        before = self._num_written
        yield from self._block()
        if self._forms and self._num_written > before:
            self._forms[-1].num_filled += 1

    def _button(self, node: LexborNode) -> ElementWriter:
        """Write a button that is a heading, which opens a part of the page."""
        parent = node.parent
        if parent is not None and parent.tag in ("h1", "h2", "h3", "h4", "h5", "h6", "summary", "dt"):
            yield

    def _break(self, node: LexborNode) -> ElementWriter:
        self._inline.append("\n")
        return iter(())

    def _picture(self, node: LexborNode) -> ElementWriter:
        self._image = node.attributes.get("alt") or ""
        return iter(())

    def _link(self, node: LexborNode) -> ElementWriter:
        """Write a link. An image alone is written as its description; one word is a button, such as "next"."""
        before, self._image = self._num_written, ""
        target = "" if self._marked or self._preformatted else self._targets.of(node)
        self._inline += [LINK] * bool(target)
        yield
        if self._num_written == before and " " in self._image.strip():
            self.write(self._image)
        if target:
            self._inline.append(end_of_link(target if self._num_written > before else ""))

    def _code(self, node: LexborNode) -> ElementWriter:
        yield from self._marks(lambda text, before: f"`{text}`" if text.strip() and "`" not in text else text)

    def _superscript(self, node: LexborNode) -> ElementWriter:
        yield from self._marks(lambda text, before: _note_or_superscript(text, before, node.css_first("a") is not None))

    def _marks(self, marked: Callable[[str, str], str]) -> ElementWriter:
        """Replace the text of an inline element, unless it is in another such element or has paragraphs.

        marked: called with the text and the character before it.
        """
        start, paragraph = len(self._inline), self._paragraph
        self._marked += 1
        yield
        self._marked -= 1
        if self._paragraph == paragraph and not (self._marked or self._preformatted):
            before = self._inline[start - 1][-1:] if start else ""
            self._inline[start:] = [marked("".join(self._inline[start:]), before)]

    def _reading(self, node: LexborNode) -> ElementWriter:
        """Write the reading of a ruby text in parentheses."""
        self.write("(")
        yield
        self.write(")")

    def _formula(self, node: LexborNode) -> ElementWriter:
        is_block = node.attributes.get("display") == "block"
        if is_block:
            self._end_paragraph()
        self.write(formula_text(node))
        if is_block:
            self._end_paragraph()
        return iter(())

    def _nothing(self, node: LexborNode) -> ElementWriter:
        return iter(())


_NESTING = frozenset("form li dt table tr td th".split())
_ELEMENTS: dict[str, Callable[[_Writer, LexborNode], ElementWriter]] = {
    **dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6"), _Writer._heading),
    **dict.fromkeys(("pre", "listing", "plaintext", "xmp"), _Writer._code_block),
    **dict.fromkeys(("ul", "ol"), _Writer._list),
    **dict.fromkeys(("td", "th"), _Writer._cell),
    **dict.fromkeys(("code", "kbd", "samp"), _Writer._code),
    **dict.fromkeys(("rp", "annotation"), _Writer._nothing),
    "li": _Writer._item, "dt": _Writer._term, "table": _Writer._table, "tr": _Writer._row,
    "form": _Writer._form, "label": _Writer._label, "input": _Writer._input, "select": _Writer._select,
    "textarea": _Writer._text_area, "button": _Writer._button, "br": _Writer._break, "img": _Writer._picture,
    "a": _Writer._link, "sup": _Writer._superscript, "rt": _Writer._reading, "math": _Writer._formula,
}  # fmt: skip


def _span(cell: LexborNode, name: str, most: int) -> int:
    value = (cell.attributes.get(name) or "").strip()
    return max(1, min(int(value), most)) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def _note_or_superscript(text: str, before: str, is_link: bool) -> str:
    """Return "[1]" for the number of a footnote, else the superscript."""
    number = text.strip()
    if not is_link:
        return superscript(text, before)
    return (f"[{number}]" if number.isalnum() else number) + text[len(text.rstrip()) :]
