"""Quotations in an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

_QUOTED = re.compile(
    r'"([^"\n]{3,400}+)"(?!\s{0,2}:)|“([^“”\n]{2,400}+)”|„([^„“”\n]{3,400}+)[“”]|«([^«»\n]{3,400}+)»|「([^「」\n]{2,400}+)」|`([^`\n]{3,400}+)`'
)  # a text in quotes before a colon is a key or a label


def quotes(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of quoted texts of up to 400 characters, without the marks."""
    for found in _QUOTED.finditer(text):
        yield found.span(found.lastindex or 0)
