"""Word documents, by mammoth: headings, lists and tables, without pictures. A .docx has no page ends."""

from __future__ import annotations

import io
from typing import Any

from cacheblend_cli.corpus.converters.converter import parsing
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.converters.office import opened
from cacheblend_cli.corpus.layout import Converted


def from_docx(data: bytes) -> Converted:
    with parsing("mammoth", what := "a Word document"):
        import mammoth

        opened(data, what)
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=_no_image).value
    return html_text(f"<body>{html}</body>")


def _no_image(image: Any) -> list[Any]:
    return []
