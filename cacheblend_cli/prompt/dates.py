"""Dates of chat templates that print one. The date is in the prefix and so in every key: the store keeps it for each model and
salt until the user asks for another."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, timedelta

from cacheblend_store import ChunkStore, Memo
from cacheblend_store.format.blobs import CODECS
from msgspec import convert, to_builtins

from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection

_KIND = "date"
_LOOKED_BACK = 400  # days
_EARLIER = 16


@dataclass(frozen=True)
class KeptDates:
    """day: date in the prefix now. earlier: previous dates, latest last, whose chunks may still be stored."""

    day: date
    earlier: tuple[date, ...] = ()


def today() -> date:
    return date.today()


def parse_day(text: str) -> date:
    """Parse `today` or YYYY-MM-DD. Raises UsageError."""
    with suppress(ValueError):
        return today() if text == "today" else date.fromisoformat(text)
    raise UsageError(f"--date {text} is not a date", "today, or a day as 2026-01-31")


def kept_dates(store: ChunkStore, collection: Collection) -> KeptDates | None:
    """Return the dates kept for the collection's model and salt; without any (tiers do not contain them), the latest day
    whose prefix is stored. None if the template prints no date or nothing is stored."""
    if collection.day is None:
        return None
    memo = store.memo(_KIND, _name(collection))
    if memo is not None:
        with suppress(ValueError):
            return convert(memo.value, KeptDates)
    with store.read() as reader:
        days = range(_LOOKED_BACK) if reader.entries("chunks") else range(0)
        for back in days:
            day = today() - timedelta(days=back)
            own = collection.on(day)
            if any(reader.get("chunks", replace(own, codec=codec).prefix_key) is not None for codec in CODECS):
                return KeptDates(day)
    return None


def keep_date(store: ChunkStore, collection: Collection) -> None:
    """Keep the collection's date for its model and salt."""
    if collection.day is None:
        return
    kept = kept_dates(store, collection)
    before = () if kept is None else (*kept.earlier, kept.day)
    earlier = tuple(day for day in before if day != collection.day)[-_EARLIER:]
    value = to_builtins(KeptDates(collection.day, earlier))
    memo = store.memo(_KIND, _name(collection))
    if memo is None or memo.value != value:
        store.put_memos([Memo(_KIND, _name(collection), value, time.time())])


def age_note(day: date) -> list[str]:
    """Return a note for a date that is more than a day old, else nothing."""
    age = (today() - day).days
    if age <= 1:
        return []
    return [
        f"the prompt says that it is {day.isoformat()}, {age} days ago, as the stored chunks do; "
        "for today's date: cacheblend precompute --date today PATH"
    ]


def _name(collection: Collection) -> str:
    return f"{collection.model.fingerprint}\0{collection.salt_digest}"
