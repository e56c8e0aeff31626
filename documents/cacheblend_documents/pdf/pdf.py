"""PDF. Its library is imported with the first file to convert."""

from __future__ import annotations

from cacheblend_documents.converter import parsing
from cacheblend_documents.layout import Converted


def from_pdf(data: bytes) -> Converted:
    with parsing("pypdfium2", "a PDF"):
        from cacheblend_documents.pdf.pages import converted

        return converted(data)
