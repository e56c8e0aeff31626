"""Blank pages of a PDF, told from damaged ones. PDFium finds nothing to draw on either, and does not say why."""

from __future__ import annotations

import base64
import re
import zlib
from io import BytesIO

from pypdfium2 import PdfDocument, PdfiumError, raw

_MOST_COPIED = 64 << 20  # bytes of copied pages for a document
_MOST_STREAMS = 64  # of a blank page
_LONGEST = 64 << 10  # bytes of a blank page's content
_CONTENTS = re.compile(rb"/Contents[ \[]*((?:\d+ 0 R *)+)")
_DRAWING = frozenset(b"Tj TJ ' \" Do f F f* S s B B* b b* sh EI".split())
"""Operators that show something."""


class BlankPages:
    """Recognises the blank pages of a document."""

    def __init__(self, document: PdfDocument) -> None:
        self._document = document
        self._copied = 0
        self._is_intact = bool(raw.FPDF_DocumentHasValidCrossReferenceTable(document.raw))

    def is_blank(self, index: int) -> bool:
        """Return whether a page on which PDFium finds nothing is intact. index: of the page, from 0 on."""
        if not self._is_intact or self._copied > _MOST_COPIED:
            return False
        file = BytesIO()
        with PdfDocument.new() as copy:
            try:
                copy.import_pages(self._document, [index])
                copy.save(file)
            except PdfiumError:
                return False
        written = file.getvalue()
        self._copied += len(written)
        named = _CONTENTS.search(written)
        numbers = named[1].split()[::3] if named is not None else ()
        return len(numbers) <= _MOST_STREAMS and all(_draws_nothing(_stream(written, number)) for number in numbers)


def _stream(written: bytes, number: bytes) -> bytes | None:
    """Return the decoded stream of an object in a file that PDFium wrote; None if it is missing or damaged."""
    start = written.find(b"\n%s 0 obj\r\n" % number)
    begins, ends = written.find(b">>stream\r\n", start), written.find(b"endstream", start)
    if not 0 <= start < begins < ends:
        return None
    entries, data = written[start:begins], written[begins + 10 : ends]
    try:
        if b"/ASCII85Decode" in entries:
            data = base64.a85decode(b"<~" + data.strip(), adobe=True)
        if b"/FlateDecode" in entries:
            inflate = zlib.decompressobj()
            data = inflate.decompress(data, _LONGEST)
            if not inflate.eof and data:
                return None
    except (ValueError, zlib.error):
        return None
    has_others = re.search(rb"/(?!ASCII85Decode|FlateDecode)\w+Decode\b", entries)
    return None if has_others or len(data) >= _LONGEST else data


def _draws_nothing(content: bytes | None) -> bool:
    return content is not None and _DRAWING.isdisjoint(content.split())
