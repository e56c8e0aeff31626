"""Pages of a PDF, read with PDFium, with form values and comments. Pages that cannot be read are omissions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pypdfium2 import PdfDocument, PdfiumError, PdfPage, raw

from cacheblend_documents.converted import SCANNED, Converted, Mark, NotConverted, joined
from cacheblend_documents.omissions import Omissions, number_ranges
from cacheblend_documents.pdf.annotations import annotations_of
from cacheblend_documents.pdf.blank import BlankPages
from cacheblend_documents.pdf.characters import page_characters
from cacheblend_documents.pdf.hyphens import dehyphenated, rejoined
from cacheblend_documents.pdf.line_order import arranged
from cacheblend_documents.pdf.lines import lines_of

_UNKNOWN_MIN = 3  # unknown characters of a page that are worth an omission; fewer are bullets and ornaments
_FEW = 0.05  # share of unknown characters on a page that is not worth recognising
_RANGES = 12  # ranges of page numbers to name
_SCANNED = "may be scanned (run: ocrmypdf in.pdf out.pdf)"
_UNMAPPED = "fonts that do not say which characters they show (run: ocrmypdf --force-ocr in.pdf out.pdf)"
_SLOPING = "blanks between words in sloping letters (Nastaliq)"

_NO_TITLE = re.compile(
    r"\(?(untitled|anonymous|none|title|document|presentation|powerpoint presentation)\)?( document)?"
    r"|microsoft word - (document|dokument)\d*",
    re.IGNORECASE,
)
"""Titles that programs write if there is none."""


def from_pdf(data: bytes) -> Converted:
    """Convert a PDF. Raises NotConverted."""
    try:
        document = PdfDocument(data)
    except PdfiumError as error:
        if error.err_code in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            raise NotConverted("a PDF with a password", "with a password") from error
        raise NotConverted("not a PDF, or damaged beyond reading", "damaged or locked") from error
    with document:
        pages = _Pages(document)
        texts = dehyphenated(list(pages.texts()))
        title = _title(document)
    if not any(texts):
        raise pages.refusal(len(texts))
    parts = ((text, Mark(0, f"page {n}")) for n, text in enumerate(texts, 1))
    found = joined(parts, title=title, omissions=pages.omissions())
    return replace(found, scanned_pages=pages.scanned)


def _title(document: PdfDocument) -> str:
    title = " ".join(document.get_metadata_value("Title").replace("\0", "").split())
    return "" if _NO_TITLE.fullmatch(title) else title


class _Pages:
    """Reads the pages of a document, and keeps the numbers of those that cannot be read."""

    def __init__(self, document: PdfDocument) -> None:
        self._document = document
        self._others = Omissions()
        self._blank = BlankPages(document)
        self._damaged, self._empty, self._scanned, self._unmapped, self._sloping = [list[int]() for _ in range(5)]

    def texts(self) -> Iterator[str]:
        """Yield the text of each page, "" if it has none."""
        kind = self._document.get_formtype()
        if kind != raw.FORMTYPE_NONE:
            self._document.init_forms()
        if kind == raw.FORMTYPE_XFA_FULL:
            self._others.say("its XFA form is not read; print it to a PDF")
        if count := self._document.count_attachments():
            self._others.add("attached file", count=count)
        if (count := raw.FPDF_GetSignatureCount(self._document.raw)) > 0:
            self._others.add("signature", count=count)
        for number in range(1, len(self._document) + 1):
            try:
                page = self._document[number - 1]
                yield self._text(page, number)
            except PdfiumError:
                self._damaged.append(number)
                yield ""
            else:
                page.close()

    def _text(self, page: PdfPage, number: int) -> str:
        characters = page_characters(page)
        num_unknown = characters.num_unknown
        lines = list(lines_of(characters.text, characters.boxes))
        annotations = annotations_of(self._document, page)
        annotations.fill(lines)
        if annotations.num_left:
            self._others.add("annotation", f"page {number}", count=annotations.num_left)
        text = "\n\n".join(filter(None, (rejoined(arranged(lines)), *annotations.comments)))
        if characters.num_sloping:
            self._sloping.append(number)
        if num_unknown >= _UNKNOWN_MIN and num_unknown < _FEW * len(characters.text):
            self._others.add("unreadable character", f"page {number}", count=num_unknown)
        elif num_unknown >= _UNKNOWN_MIN:
            self._unmapped.append(number)
        elif not text:
            if raw.FPDFPage_CountObjects(page):
                self._scanned.append(number)
            elif not self._blank.is_blank(number - 1):
                self._empty.append(number)
        return text

    @property
    def scanned(self) -> tuple[int, ...]:
        """Numbers of the pages that need text recognition."""
        return tuple(sorted((*self._scanned, *self._unmapped)))

    def refusal(self, count: int) -> NotConverted:
        """Return the reason for which a document without text is not read. count: number of its pages."""
        if self._unmapped:
            return NotConverted(f"a PDF without readable text: it has {_UNMAPPED}", SCANNED)
        pages, have, are = (f"its {count} pages", "have", "are") if count != 1 else ("its page", "has", "is")
        if self._scanned:
            return NotConverted(f"a scanned PDF: {pages} {have} no text; run: ocrmypdf in.pdf out.pdf", SCANNED)
        return NotConverted(f"a PDF without text: {pages} {are} blank or damaged", "blank or damaged")

    def omissions(self) -> Iterator[str]:
        if self._damaged:
            yield f"{_numbers(self._damaged)} cannot be read"
        if self._empty:
            yield f"{_numbers(self._empty)}: no readable content, may be damaged"
        if self._scanned:
            yield f"{_numbers(self._scanned)}: no text; {_SCANNED}"
        if self._unmapped:
            yield f"{_numbers(self._unmapped)}: text in {_UNMAPPED}"
        if self._sloping:
            yield f"{_numbers(self._sloping)}: {_SLOPING}"
        yield from self._others


def _numbers(pages: list[int]) -> str:
    """Return sorted page numbers in words, such as "pages 2-4, 7"."""
    ranges = number_ranges(pages)
    more = ", ..." if len(ranges) > _RANGES else ""
    return f"page{'s' * (len(pages) > 1)} {', '.join(ranges[:_RANGES])}{more}"
