"""Text of a paragraph of a Word document."""

from __future__ import annotations

import re

from cacheblend_cli.corpus.converters.superscripts import superscript

RAISED, LOWERED = "\x01", "\x02"
"""Begin and end of a superscript within the text of a paragraph. XML has no such characters."""
_SUPERSCRIPT = re.compile(f"{RAISED}([^{RAISED}{LOWERED}]*){LOWERED}")


def inline_text(text: str) -> str:
    """Return the text of a paragraph with single blanks, and superscripts as in "10^6"."""
    if RAISED in text:
        text = _SUPERSCRIPT.sub(_raised, text.replace(LOWERED + RAISED, ""))
        text = text.replace(RAISED, "").replace(LOWERED, "")
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip("\n")


def _raised(found: re.Match[str]) -> str:
    return superscript(found[1], found.string[max(found.start() - 1, 0) : found.start()])
