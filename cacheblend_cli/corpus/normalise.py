"""Text normalisation for search: documents and queries go through the same steps."""

from __future__ import annotations

import re
import unicodedata

_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # scripts that write no spaces between words
_TO_WIDE = re.compile(f"([{_WIDE}])")
_FROM_WIDE = re.compile(f" ([{_WIDE}]) ")


def indexed(text: str) -> str:
    """Return the text as the index holds it: Unicode form NFKC without soft hyphens and lone surrogates, then `spaced`.

    NFKC makes letters of ligatures and of full-width forms: PDFs often have the "ffi" of "Office" as one character.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text).replace("\u00ad", "")
    return spaced(text.encode("utf-8", "replace").decode("utf-8"))


def spaced(text: str) -> str:
    """Return the text with every character of a script without spaces as a word of its own."""
    return _TO_WIDE.sub(r" \1 ", text)


def unspaced(text: str) -> str:
    """Undo `spaced`."""
    return _FROM_WIDE.sub(r"\1", text)
