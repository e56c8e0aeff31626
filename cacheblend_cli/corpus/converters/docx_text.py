"""Text of a paragraph of a Word document."""

from __future__ import annotations

import re

RAISED, LOWERED = "\x01", "\x02"
"""Begin and end of a superscript within the text of a paragraph. XML has no such characters."""
_SUPERSCRIPT = re.compile(f"{RAISED}([^{RAISED}{LOWERED}]*){LOWERED}")
_ORDINALS = frozenset("st nd rd th e er re ère è ème eme nd nde o a os as º ª".split())


def inline_text(text: str) -> str:
    """Return the text of a paragraph with single blanks, and superscripts as in "10^6"."""
    if RAISED in text:
        text = _SUPERSCRIPT.sub(_raised, text.replace(LOWERED + RAISED, ""))
        text = text.replace(RAISED, "").replace(LOWERED, "")
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip("\n")


def _raised(found: re.Match[str]) -> str:
    text, before = found[1].strip(), found.string[found.start() - 1 : found.start()]
    blank = " " if found[1][-1:].isspace() else ""
    is_after_number = before.isdigit() or before in tuple("IVX")
    if not text or not before or before.isspace() or (is_after_number and text.lower() in _ORDINALS):
        return text + blank
    unsigned = text.removeprefix("-").removeprefix("+").removeprefix("\u2212")
    if not unsigned[:1].isalnum():
        return text + blank  # a mark: "*", "[1]"
    return (f"^{text}" if unsigned.isalnum() else f"^({text})") + blank
