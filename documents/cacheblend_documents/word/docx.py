"""Word documents (Office Open XML) to Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.office.package import DamagedPart, OfficePackage, reporting_damage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.word.numbering import Numbering
from cacheblend_documents.word.styles import Styles
from cacheblend_documents.word.tables import Block, markdown
from cacheblend_documents.word.walk import Notes, Walk


def from_docx(data: bytes) -> Converted:
    """Convert text, lists, tables, notes, comments, headers and footers. A .docx has no page ends."""
    document = _Document(OfficePackage(data, "a Word document"))
    text = "".join(markdown(document.blocks())).strip("\n")
    title, omissions = document.walk.title, tuple(document.omissions)
    return Converted(text + "\n", "markdown", keeps_lines=False, title=title, omissions=omissions)


class _Document:
    """The parts of a document. A damaged one is left out."""

    def __init__(self, package: OfficePackage) -> None:
        self.omissions = Omissions()
        self._package, self._main = package, package.main
        styles = Styles(self._part("styles", "styles"))
        numbering = Numbering(self._part("numbering", "list numbers"), styles)
        notes = {kind: self._notes(kind) for kind in ("footnote", "endnote", "comment")}
        self.walk = Walk(package, styles, numbering, notes, self.omissions)

    def blocks(self) -> Iterator[Block]:
        """Yield the headers, the body and the footers. Raises NotConverted if nothing can be read."""
        yield from self._margins("header")
        has_text = False
        try:
            for element in self._package.blocks(self._main, "w:body"):
                for block in self.walk.body([element]):
                    has_text = True
                    yield block
        except DamagedPart as error:
            if not has_text:
                raise NotConverted("not a Word document: its text cannot be read", "damaged or locked") from error
            self.omissions.say("the text after a damaged place cannot be read")
        yield from self._margins("footer")

    def _part(self, kind: str, what: str) -> Element | None:
        with reporting_damage(self.omissions, f"its {what} cannot be read"):
            return next(map(self._package.xml, self._package.related(self._main, kind)), None)
        return None

    def _notes(self, kind: str) -> Notes:
        root = self._part(f"{kind}s", f"{kind}s")
        return {} if root is None else {element.get("id", ""): element for element in root.findall(f"w:{kind}")}

    def _margins(self, kind: str) -> Iterator[Block]:
        """Yield the distinct headers or footers of all sections."""
        texts = dict[str, None]()
        for name in self._package.related(self._main, kind):
            with reporting_damage(self.omissions, f"a {kind} cannot be read"):
                texts[self.walk.margin(name)] = None
        for text in filter(None, texts):
            yield Block(f"{kind.title()}: {text}")
