"""XML to text: the paragraphs of prose, or the named values of data.

In prose, elements have text and elements side by side: <para>Press <key>F1</key> to stop.</para>. In data they seldom
do, and each value has its element's name before it: "price: 19".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html.entities import html5
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from cacheblend_documents.charsets import decoded_page
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import without_controls, without_data_uris
from cacheblend_documents.web.html import html_text

_DECLARATION = re.compile(r"\s*<\?xml\s[^<>]*\?>")
_LONGEST_ENTITY = 1000  # characters
_REFERENCE = re.compile(r"&(?!(?:lt|gt|amp|apos|quot|#\w{1,9});)")
_HEADINGS = frozenset(("title", "head", "article-title"))
_DEEPEST_HEADING = 6
_ROWS = frozenset(("row", "tr"))
_FEED_TEXTS = frozenset(("description", "summary", "content", "encoded"))
_MARKUP = re.compile(r"</[a-z]{1,10}>|<(?:p|br|img|a|div)\b", re.IGNORECASE)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{60,200} )*[A-Za-z0-9+/]+={0,2}")  # on one line or several
_SHORTEST_BASE64 = 1000
_XML_PREFIXES = frozenset(("xmlns", "xml", "xsi"))
_MOST_MIXED = 0.05  # maximum number of elements with both in data, as a share of those without elements


def from_xml(data: bytes) -> Converted:
    text = _Texts(omissions := Omissions()).of(_Parser(omissions).parsed(decoded_page(data, omissions)))
    text = without_data_uris(without_controls(text))
    return Converted(text, "markdown", keeps_lines=False, omissions=tuple(omissions))


class _Parser:
    """Parser of one file. It opens no other file, and refuses entities that could grow."""

    def __init__(self, omissions: Omissions) -> None:
        self._omissions = omissions
        self._builder, self._open = TreeBuilder(), list[str]()  # open elements, outermost first
        self._parser = parser = expat.ParserCreate()
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._builder.data
        parser.EntityDeclHandler, parser.SkippedEntityHandler = self._declared, self._skipped
        parser.ExternalEntityRefHandler = self._external

    def parsed(self, text: str) -> Element:
        """Return the root element, without what follows damage. Raises NotConverted."""
        declaration = _DECLARATION.match(text)
        text = text[declaration.end() :] if declaration else text
        try:
            if "<!DOCTYPE" not in text:  # with one, entities without a declaration are no damage
                self._parser.Parse('<!DOCTYPE a SYSTEM "a">', False)
            self._parser.Parse(text, True)
        except expat.ExpatError as error:
            if not self._open:
                raise NotConverted("not XML, or damaged", "damaged or locked") from error
            self._omissions.say(f"what follows line {error.lineno}, which is not well-formed XML")
            while self._open:
                self._end("")
        return self._builder.close()

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._open.append(tag.rpartition(":")[2])
        self._builder.start(self._open[-1], attributes)

    def _end(self, _: str) -> None:
        self._builder.end(self._open.pop())

    def _declared(self, name: str, is_parameter: bool, value: str | None, *_: str | None) -> None:
        if not is_parameter and value and (len(value) > _LONGEST_ENTITY or _REFERENCE.search(value)):
            raise NotConverted(
                f"its entity {name[:40]} is long or nested: expand it with xmllint --noent", "XML with nested entities"
            )

    def _skipped(self, name: str, is_parameter: bool) -> None:
        if not is_parameter and f"{name};" in html5:
            self._builder.data(html5[f"{name};"])
        elif not is_parameter:
            self._omissions.add("entity without a text", name, plural="entities without a text")

    def _external(self, _context: str, _base: str | None, address: str | None, _public: str | None) -> int:
        self._omissions.add("text in another file", address or "", plural="texts in other files")
        return 1


class _Texts:
    """Texts of the elements of one file."""

    def __init__(self, omissions: Omissions) -> None:
        self._omissions = omissions
        self._is_data = False

    def of(self, root: Element) -> str:
        num_mixed, num_leaves = (sum(map(f, root.iter())) for f in (_is_mixed, lambda e: not len(e)))
        self._is_data = num_mixed <= _MOST_MIXED * num_leaves
        return "\n\n".join("\n".join(lines) for lines in self._paragraphs((root,), [], 0) if lines)

    def _paragraphs(self, elements: Iterable[Element], lines: list[str], depth: int) -> Iterator[list[str]]:
        """Yield the lines of each paragraph. lines: the first ones."""
        for element in elements:
            if not self._is_data and element.tag in _HEADINGS:
                yield lines
                title, lines = self._line(element.itertext()), []
                yield [f"{'#' * min(max(depth, 1), _DEEPEST_HEADING)} {title}"] if title else []
            elif not self._is_data and element.tag in _ROWS:
                lines += filter(None, [" | ".join(self._line(cell.itertext()) for cell in element)])
            elif len(element) and not _is_mixed(element):
                yield lines
                named = _attributes(element) if self._is_data else ""
                yield from self._paragraphs(element, [f"{element.tag}: {named}"] if named else [], depth + 1)
                lines = []
            elif self._is_data:
                value = ", ".join(filter(None, (self._value(element), _attributes(element))))
                lines += [f"{element.tag}: {value}"] if value else []
            else:
                lines += filter(None, self._prose(element, depth))
        yield lines

    def _prose(self, element: Element, depth: int) -> Iterator[str]:
        """Yield the text of an element on one line. Lists and the like in it have lines of their own."""
        inline = [element.text or ""]
        for child in element:
            if len(child) > 1 and not _is_mixed(child):
                yield self._line(inline)
                for lines in self._paragraphs(child, [], depth + 1):
                    yield from lines
                inline = []
            else:
                inline += child.itertext()
            inline.append(child.tail or "")
        yield self._line(inline)

    def _value(self, element: Element) -> str:
        """Return the text of an element of data. Feeds have pages of HTML as text."""
        text = "".join(element.itertext())
        if element.tag in _FEED_TEXTS and _MARKUP.search(text):
            return html_text(text).text.strip()
        return self._line((text,))

    def _line(self, texts: Iterable[str]) -> str:
        """Return texts on one line. Base64, as of pictures, is left out."""
        text = " ".join("".join(texts).split())
        if len(text) < _SHORTEST_BASE64 or not _BASE64.fullmatch(text):
            return text
        self._omissions.add("element with base64 data", plural="elements with base64 data")
        return ""


def _is_mixed(element: Element) -> bool:
    """Return whether an element has both text and elements."""
    return len(element) > 0 and any((text or "").strip() for text in (element.text, *(e.tail for e in element)))


def _attributes(element: Element) -> str:
    """Return "name: value" of the attributes, except those of XML itself."""
    named = ((name.rpartition(":"), value.strip()) for name, value in element.attrib.items())
    return ", ".join(
        f"{name}: {value}"
        for (prefix, _, name), value in named
        if value and prefix not in _XML_PREFIXES and name != "xmlns"
    )
