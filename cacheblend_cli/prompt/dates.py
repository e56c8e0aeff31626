"""Dates in chat templates.

The date is part of the prefix, and so of every key. So collections in the store keep their date (see
`records.kept_day`) until the user chooses another.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import date

from cacheblend_cli.errors import UsageError


def today() -> date:
    return date.today()


def parse_day(text: str) -> date:
    """Parse `today` or YYYY-MM-DD. Raises UsageError."""
    with suppress(ValueError):
        return today() if text == "today" else date.fromisoformat(text)
    raise UsageError(f"--date {text} is not a date", "use today, or a date like 2026-01-31")


def age_note(day: date) -> list[str]:
    """Return a note for a date that is more than a day old, else nothing."""
    age = (today() - day).days
    if age <= 1:
        return []
    return [
        f"the date in the prompt is {day.isoformat()}, {age} days ago, as in the stored chunks; "
        "for today's date: cacheblend precompute --date today PATH"
    ]
