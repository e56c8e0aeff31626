"""Addresses that links of a page lead to."""

from __future__ import annotations

import re
from collections import Counter

from selectolax.lexbor import LexborNode

from cacheblend_documents.inline_marks import target_of

_MOST_OF_SITE = 50  # links to one site; a page with more is an index or has a menu
_SITE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)


class LinkTargets:
    """Targets of the links of a page, except those to a site that it links to very often."""

    def __init__(self, root: LexborNode) -> None:
        self._counts = Counter(_site(_target(node)) for node in root.css("a[href]"))

    def of(self, node: LexborNode) -> str:
        """Return the target of an <a>, "" if it is not to be shown."""
        target = _target(node)
        return target if self._counts[_site(target)] <= _MOST_OF_SITE else ""


def _target(node: LexborNode) -> str:
    return target_of(node.attributes.get("href") or "")


def _site(target: str) -> str:
    """Return the host of a web address, else the target itself."""
    found = _SITE.match(target)
    return found[1].lower() if found else target
