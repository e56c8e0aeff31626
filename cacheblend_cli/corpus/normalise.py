"""Text normalisation for search: documents and queries go through the same steps."""

from __future__ import annotations

import re
import unicodedata

_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # scripts that write no spaces between words
# not compiled before they are used, as most commands do without: such classes take milliseconds
_TO_WIDE, _FROM_WIDE = f"([{_WIDE}])", f" ([{_WIDE}]) "


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
    return re.sub(_TO_WIDE, r" \1 ", text)


def unspaced(text: str) -> str:
    """Undo `spaced`."""
    return text if text.isascii() else re.sub(_FROM_WIDE, r"\1", text)
