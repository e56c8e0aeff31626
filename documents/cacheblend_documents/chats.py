"""Messages in exports of chats: Telegram, Facebook and Instagram, Slack."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

_FORMS = (
    ("from", "date", "text"), ("sender_name", "timestamp_ms", "content"), ("user", "ts", "text"), ("username", "ts", "text"),
)  # fmt: skip
"""Fields with sender, time and text: of Telegram, Facebook and Instagram, Slack, and Slack's bots."""
_REPEATED = frozenset(("type", "date_unixtime", "text_entities", "blocks", "user_profile"))
"""Fields that repeat the kind, time, text or sender of a message."""
_OF_LETTERS = ("title", "subject", "to")
_LINK = re.compile(r"<([^<>|\s]{1,2000})(?:\|([^<>|]{1,2000}))?>")  # of Slack: "<https://a.example|label>", "<@U02>"
_MILLISECONDS = 10**11  # times from here on are not in seconds


class SentMessage(NamedTuple):
    """A message of an export."""

    sender: str
    text: str
    time: str
    used: frozenset[str]  # names of the fields that need not be shown any more


def sent_message(record: Mapping[str, Any]) -> SentMessage | None:
    """Return the message that a record has, None for a record of another form or a message without a text."""
    for sender, time, text in _FORMS:
        shown = rich_text(record.get(text))
        if isinstance(record.get(sender), str) and time in record and shown.strip():
            if any(name in record for name in _OF_LETTERS):
                return None
            name, used = record[sender], _REPEATED | {sender, time, text}
            if time == "ts":
                shown, profile = html.unescape(_LINK.sub(_link, shown)), record.get("user_profile")
                name = (profile.get("real_name") if isinstance(profile, Mapping) else "") or name
            return SentMessage(str(name), shown, _time(record[time]), used)
    return None


def rich_text(value: Any) -> str:
    """Return a text; that of a list of texts and objects with a text, such as links; "" for other values."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not any(isinstance(piece, Mapping) for piece in value):
        return ""
    pieces = [piece.get("text") if isinstance(piece, Mapping) else piece for piece in value]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else ""


def _time(value: Any) -> str:
    """Return a time since the epoch in ISO 8601; other times as they are."""
    try:
        seconds = float(value)
        moment = datetime.fromtimestamp(seconds / 1000 if seconds >= _MILLISECONDS else seconds, UTC)
    except (ValueError, TypeError, OverflowError, OSError):
        return str(value)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _link(found: re.Match[str]) -> str:
    target, label = found[1], found[2]
    if target[0] in "@#!":  # a person, a channel, everybody
        return ("#" if target[0] == "#" else "@") + (label or target[1:]).lstrip("@#")
    return f"{label} ({target})" if label and not target.endswith(label) else label or target
