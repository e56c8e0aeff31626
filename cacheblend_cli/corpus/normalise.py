"""Text normalisation for search, applied to documents and queries alike."""

from __future__ import annotations

import re
import unicodedata

_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # scripts that write no spaces between words
# Compiled on first use: such large character classes take milliseconds, and most commands do not need them.
_TO_WIDE, _FROM_WIDE = f"([{_WIDE}])", f" ([{_WIDE}]) "


def indexed(text: str) -> str:
    """Return the text in the form of the index: Unicode NFKC without soft hyphens and lone surrogates, then `spaced`.

    NFKC splits ligatures and maps full-width forms to letters: PDFs often write the "ffi" of "Office" as one character.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text).replace("\u00ad", "")
    return spaced(text.encode("utf-8", "replace").decode("utf-8"))


def spaced(text: str) -> str:
    """Put blanks around every character of a script without spaces, so that each is a word."""
    return re.sub(_TO_WIDE, r" \1 ", text)


def unspaced(text: str) -> str:
    """Undo `spaced`."""
    return text if text.isascii() else re.sub(_FROM_WIDE, r"\1", text)
