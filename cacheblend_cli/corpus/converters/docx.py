"""Word documents, read with mammoth."""

from __future__ import annotations

import io

from cacheblend_cli.corpus.converters.archive import opened
from cacheblend_cli.corpus.converters.converter import parsing
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.layout import Converted


def from_docx(data: bytes) -> Converted:
    """Convert headings, lists, tables and text, without pictures. A .docx has no page breaks."""
    with parsing("mammoth", what := "a Word document"):
        import mammoth

        opened(data, what)
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: []).value
    return html_text(f"<body>{html}</body>")
