"""Words that are cut at a line end. The hyphen may be one of the word: "self-employed"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from cacheblend_documents.pdf.lines import HYPHEN

_HYPHENS = "-\u00ad\u2010"
_CUT = re.compile(rf"(?<![^\W\d_])([^\W\d_]++){HYPHEN}(?=([^\W\d_]+))")
_WORD = re.compile(r"[^\W\d_]+(?:[-\u2010][^\W\d_]+)*")
_PREFIXES = frozenset(("half", "non", "self", "well"))
"""First parts of English words with a hyphen. Words without one seldom begin with them and are cut there."""


def rejoined(lines: Iterable[str]) -> str:
    """Join lines. HYPHEN stands where a hyphen cuts a word that goes on with a lower-case letter."""
    parts: list[str] = []
    for line in lines:
        line = line.strip().replace(HYPHEN, "-")
        before = parts[-1][-2:] if parts else ""
        if len(before) > 1 and before[0].isalpha() and before[1] in _HYPHENS and line[:1].islower():
            parts[-1] = parts[-1][:-1] + HYPHEN * (before[1] != "\u00ad")
        elif parts:
            parts.append("\n")
        parts.append(line)
    text = "".join(parts).replace("\u00ad", "")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # PDFium gives code units


def dehyphenated(texts: Sequence[str]) -> list[str]:
    """Return the pages of a document without the hyphens that cut words. Those of words are kept: if the document has
    the word elsewhere with a hyphen more often than without, or if it has neither and the word begins with "self"."""
    counts = Counter(_words(texts)) if any(HYPHEN in text for text in texts) else Counter[str]()

    def first_part(cut: re.Match[str]) -> str:
        first, rest = cut[1].lower(), cut[2].lower()
        lead = counts[f"{first}-{rest}"] - counts[first + rest]
        return cut[1] + "-" * (lead > 0 or (lead == 0 and first in _PREFIXES))

    return [_CUT.sub(first_part, text).replace(HYPHEN, "-") for text in texts]


def _words(texts: Sequence[str]) -> Iterator[str]:
    """Yield each word, and each two that a hyphen joins, in lower case."""
    for text in texts:
        for found in _WORD.finditer(text.lower()):
            parts = found[0].replace("\u2010", "-").split("-")
            yield from parts
            yield from map("-".join, pairwise(parts))
