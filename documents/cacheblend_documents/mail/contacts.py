"""Contacts (vCard): the name as a heading, the other fields one a line. Pictures, sounds and keys are not text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from quopri import decodestring

from cacheblend_documents.charsets import codec_of
from cacheblend_documents.converted import Converted, Mark, joined
from cacheblend_documents.mail.calendar_events import properties, unescaped
from cacheblend_documents.plain_text import decoded

_LABELS = {
    "ORG": "Organization", "TITLE": "Title", "ROLE": "Role", "NICKNAME": "Nickname", "EMAIL": "Email", "TEL": "Phone", "ADR": "Address",
    "URL": "URL", "BDAY": "Birthday", "ANNIVERSARY": "Anniversary", "NOTE": "Note", "CATEGORIES": "Categories",
}  # fmt: skip
_QUOTED = "QUOTED-PRINTABLE"
_CHARSET = re.compile(r"CHARSET=([\w.-]+)", re.IGNORECASE)
_KIND = re.compile(r"\b(home|work|cell|mobile|fax|main)\b", re.IGNORECASE)
_COMPONENT = re.compile(r"(?<!\\);")


def from_contacts(data: bytes) -> Converted:
    return joined(((text, Mark(0)) for text in _cards(decoded(data))), "markdown")


def _cards(text: str) -> Iterator[str]:
    name, lines = "", list[str]()
    for field, parameters, value in properties(_joined_lines(text)):
        field = field.rpartition(".")[2]  # without its group, "item1."
        if field == "BEGIN":
            name, lines = "", []
        elif field == "END":
            yield "\n".join([f"# {name}\n", *lines] if name else lines)
        elif field == "FN" or (field == "N" and not name):
            parts = _components(parameters, value)
            name = " ".join(parts if field == "FN" else [*parts[1:2], *parts[:1]])
        elif field in _LABELS and (shown := ", ".join(filter(None, _components(parameters, value)))):
            kind = _KIND.search(parameters)
            lines.append(f"{_LABELS[field]}{f' ({kind[1].lower()})' if kind else ''}: {shown}")


def _components(parameters: str, value: str) -> list[str]:
    """Return the texts of a value's components, such as street and city, each on one line."""
    if _QUOTED in parameters.upper():
        charset = _CHARSET.search(parameters)
        value = decodestring(value.encode()).decode(codec_of(charset[1] if charset else "utf-8") or "utf-8", "replace")
    value = value.removeprefix("tel:").removeprefix("mailto:")
    return [" ".join(unescaped(component).split()) for component in _COMPONENT.split(value)]


def _joined_lines(text: str) -> str:
    """Join the lines of quoted-printable, which end in "=" if they go on."""
    parts, is_quoted, goes_on = list[str](), False, False
    for line in text.split("\n"):
        is_quoted = is_quoted if goes_on else _QUOTED in line.partition(":")[0].upper()
        goes_on = is_quoted and line.endswith("=")
        parts.append(line[:-1] if goes_on else f"{line}\n")
    return "".join(parts)
