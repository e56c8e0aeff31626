"""PDF, read page by page with pypdf. Pages without text (scans) are reported."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from typing import Any

from cacheblend_cli.corpus.converters.converter import SCANNED, NoDocument, joined, parsing
from cacheblend_cli.corpus.layout import Converted, Mark

_HYPHEN = re.compile(r"(?<=[a-z])-\n(?=[a-z])")


def from_pdf(data: bytes) -> Converted:
    with parsing("pypdf", "a PDF"):
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError

        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns about many harmless things
        try:
            reader = PdfReader(io.BytesIO(data))
            pages = [_text(page) for page in reader.pages]
            title = str(reader.metadata.title or "") if reader.metadata is not None else ""
        except (DependencyError, FileNotDecryptedError) as error:
            raise NoDocument("a PDF with a password", "with a password") from error
    scanned = tuple(number for number, text in enumerate(pages, 1) if not text.strip())
    empty = len(scanned)
    if empty == len(pages):
        count = f"its {len(pages)} pages have" if len(pages) > 1 else "its page has"
        raise NoDocument(f"a scanned PDF: {count} no text; run: ocrmypdf in.pdf out.pdf", SCANNED)
    omissions = [f"{empty} of its {len(pages)} pages have no text; they may be scanned"] if empty else []
    parts = ((text, Mark(0, f"page {n}")) for n, text in enumerate(pages, 1))
    found = joined(parts, title=" ".join(title.split()), omissions=omissions)
    return replace(found, layout=replace(found.layout, scanned=scanned))


def _text(page: Any) -> str:
    """Return the text of a page, with hyphenated words joined."""
    text = page.extract_text().replace("\0", "").encode("utf-8", "replace").decode()
    return _HYPHEN.sub("", "\n".join(line.rstrip() for line in text.split("\n")))
