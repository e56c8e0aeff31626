"""Marks within a line: superscripts as in 10^6, and struck-out text and links as in Markdown: `~~40 euros~~`,
`[here](https://forms.example/parking)`.

Converters put marks around them, and `shown` replaces the marks of a complete paragraph. The marks are control
characters, which XML does not have.
"""

from __future__ import annotations

import re

from cacheblend_documents.converted import shortened

RAISED, LOWERED = "\x01", "\x02"
"""Begin and end of a superscript."""
STRUCK, NOT_STRUCK = "\x03", "\x04"
"""Begin and end of struck-out text."""
LINK = "\x05"
"""Begin of a link. See `end_of_link`."""
_ADDRESS, _END = "\x06", "\x07"
_MARKS = re.compile("[\x01-\x07]")
_SUPERSCRIPT = re.compile(r"\x01([^\x01\x02]*+)\x02")
_STRUCK_TEXT = re.compile(r"\x03([^\x03\x04]*+)(?:\x04|\Z)")
_FIRST_TILDE = re.compile(r"^~", re.MULTILINE)
_SAME_LINK = re.compile(r"\x06([^\x05-\x07]*+)\x07\x05(?=[^\x05-\x07]*+\x06\1\x07)")
_LINKED_TEXT = re.compile(r"(?:\x05([^\x05-\x07]*+))?\x06([^\x05-\x07]*+)\x07")
_TARGET = re.compile(r"(?:https?://|(mailto:|tel:))[^\s\x00-\x1f<>]+", re.IGNORECASE)
_LONGEST = 250  # characters of an address to keep; longer ones carry session data


def target_of(address: str) -> str:
    """Return the address to show for a link, without `mailto:` or `tel:`.

    "" for a place in the document, a relative address, a script, and a long address.
    """
    address = "%20".join(address.split())
    found = _TARGET.fullmatch(address)
    if found is None or len(address) > _LONGEST:
        return ""
    return address[len(found[1]) :].partition("?")[0] if found[1] else address


def end_of_link(target: str) -> str:
    """Return the mark at the end of a link. target: see `target_of`; without one the link is its text."""
    return f"{_ADDRESS}{target}{_END}"


def shown(text: str) -> str:
    """Replace the marks in a paragraph.

    Struck-out text that is open at the end ends there. A link that began in another paragraph is `<address>`.
    """
    if not _MARKS.search(text):
        return text
    text = _SUPERSCRIPT.sub(_raised, text.replace(LOWERED + RAISED, ""))
    text = _STRUCK_TEXT.sub(_struck, text.replace(NOT_STRUCK + STRUCK, ""))
    return _MARKS.sub("", _LINKED_TEXT.sub(_linked, _SAME_LINK.sub("", text)))


def _struck(found: re.Match[str]) -> str:
    """Strike out each line. A tilde at its start is escaped: three begin a block of code."""
    text = _FIRST_TILDE.sub(r"\\~", found[1])
    return "\n".join(_enclosed("~~", line, "~~") for line in text.split("\n"))


def _linked(found: re.Match[str]) -> str:
    text, target = found.groups()
    if text is None:
        return f" <{target}> " if target else ""
    is_shown = not target or _without_signs(target) == _without_signs(text)
    return text if is_shown else _enclosed("[", text, f"]({target})")


def _enclosed(begin: str, text: str, end: str) -> str:
    """Enclose a text, with the blanks around it outside. A blank text stays as it is."""
    inner = text.strip()
    return text.replace(inner, f"{begin}{inner}{end}") if inner else text


def _without_signs(address: str) -> str:
    return re.sub(r"^\s*(?:https?://)?(?:www\.)?|\W", "", address.casefold())


_ORDINALS = frozenset("st nd rd th e er re ère è ème eme nd nde o a os as º ª".split())
"""Endings of ordinal numbers, in lower case."""
_TRADE_MARKS = frozenset(("tm", "sm"))


def superscript(text: str, before: str) -> str:
    """Return "^6" or "^(n+1)" for an exponent, and other superscripts as they are: "th", "*", "TM".

    before: the text before it; its last character decides.
    """
    inner, last = text.strip(), before[-1:]
    blank = text[len(text.rstrip()) :]
    is_ordinal = (last.isdigit() or last in tuple("IVX")) and inner.lower() in _ORDINALS
    unsigned = inner.removeprefix("-").removeprefix("+").removeprefix("\u2212")
    if not last.strip() or is_ordinal or inner.lower() in _TRADE_MARKS or not unsigned[:1].isalnum():
        return inner + blank
    return (f"^{inner}" if unsigned.isalnum() else f"^({inner})") + blank


def _raised(found: re.Match[str]) -> str:
    return superscript(found[1], found.string[max(found.start() - 1, 0) : found.start()])


def comment_mark(author: str, kind: str = "Comment") -> str:
    """Return the mark before the text of a comment: "Comment by Mara: "."""
    name = shortened(" ".join(author.split()))
    return f"{kind} by {name}: " if name else f"{kind}: "
