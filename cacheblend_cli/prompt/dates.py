"""Dates of chat templates that print one. The date is in the prefix and so in every key: the store's collections keep theirs (see
`records.kept_day`) until the user asks for another."""

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
    raise UsageError(f"--date {text} is not a date", "today, or a day as 2026-01-31")


def age_note(day: date) -> list[str]:
    """Return a note for a date that is more than a day old, else nothing."""
    age = (today() - day).days
    if age <= 1:
        return []
    return [
        f"the prompt says that it is {day.isoformat()}, {age} days ago, as the stored chunks do; "
        "for today's date: cacheblend precompute --date today PATH"
    ]
