"""Forms of HTML: whether one is a part of the page."""

from __future__ import annotations

from dataclasses import dataclass

_LONG_FORM = 200  # characters of text, besides labels, from which a form is a part of the page
_FILLED_FORM = 2  # filled fields from which a form is a record
_LARGE_FORM = 0.3  # share of the page's text from which a form is the page
TEXT_FIELDS = frozenset("text email tel url number date datetime-local time month week color range".split())
UNSEEN_FIELDS = frozenset("hidden submit button image reset".split())


@dataclass
class Form:
    """Counts of one form."""

    num_characters: int = 0  # text besides labels
    num_filled: int = 0  # text fields with a value
    num_fields: int = 0

    def is_read(self, num_characters: int, page: int) -> bool:
        """Return whether a form is a part of the page, instead of a log-in, a search or a way to contact somebody."""
        return (
            not self.num_fields
            or self.num_filled >= _FILLED_FORM
            or self.num_characters >= _LONG_FORM
            or num_characters >= _LARGE_FORM * page
        )
