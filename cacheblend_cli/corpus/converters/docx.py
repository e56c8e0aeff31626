"""Word documents, through mammoth: headings, lists, tables, no pictures. A .docx does not say where its pages end."""

from __future__ import annotations

import io
from typing import Any

from cacheblend_cli.corpus.converters.converter import needs
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.converters.office import opened
from cacheblend_cli.corpus.layout import Converted
from cacheblend_cli.corpus.no_document import NoDocument


class DocxConverter:
    suffixes = (".docx",)

    def convert(self, data: bytes) -> Converted:
        try:
            import mammoth
        except ImportError:
            raise needs("mammoth") from None
        opened(data, "a Word document")
        try:
            html = mammoth.convert_to_html(io.BytesIO(data), convert_image=_no_image).value
        except Exception as error:  # of whatever its parser trips over
            raise NoDocument(f"not a Word document: {error}"[:120], "damaged or locked") from error
        return html_text(f"<body>{html}</body>")


def _no_image(image: Any) -> list[Any]:
    return []
