"""Superscripts on the line: "10^6"."""

from __future__ import annotations

import re

_ORDINALS = frozenset("st nd rd th e er re ère è ème eme nd nde o a os as º ª".split())
"""Endings of ordinal numbers, in lower case."""
_MARKS = frozenset(("tm", "sm"))


def superscript(text: str, before: str) -> str:
    """Return "^6" or "^(n+1)" for an exponent, and other superscripts as they are: "th", "*", "TM".

    before: the text before it; its last character decides.
    """
    inner, last = text.strip(), before[-1:]
    blank = text[len(text.rstrip()) :]
    is_ordinal = (last.isdigit() or last in tuple("IVX")) and inner.lower() in _ORDINALS
    unsigned = inner.removeprefix("-").removeprefix("+").removeprefix("\u2212")
    if not last.strip() or is_ordinal or inner.lower() in _MARKS or not unsigned[:1].isalnum():
        return inner + blank
    return (f"^{inner}" if unsigned.isalnum() else f"^({inner})") + blank


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
