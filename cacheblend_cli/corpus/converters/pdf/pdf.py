"""PDF. Its library is imported with the first file to convert."""

from __future__ import annotations

from cacheblend_cli.corpus.converters.converter import parsing
from cacheblend_cli.corpus.layout import Converted


def from_pdf(data: bytes) -> Converted:
    with parsing("pypdfium2", "a PDF"):
        from cacheblend_cli.corpus.converters.pdf.pages import converted

        return converted(data)
