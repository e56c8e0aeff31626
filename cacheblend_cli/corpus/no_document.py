"""Why a file is no document."""

from __future__ import annotations


class NoDocument(Exception):
    """reason: in words. group: what such files are counted as, the reason by default. unread: it may be a document, nobody
    could look. by_rule: of such a kind are not even opened."""

    def __init__(self, reason: str, group: str = "", *, unread: bool = False, by_rule: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.group, self.unread, self.by_rule = reason, group or reason, unread or by_rule, by_rule
