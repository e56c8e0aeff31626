"""Parse and format sizes, ages, durations and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from cacheblend_cli.errors import UsageError

_BYTES = {"": 1, "b": 1} | {f"{p}{s}": 1024 ** (i + 1) for i, p in enumerate("kmgt") for s in ("", "b", "ib")}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of "500MB", "1.5 GiB" or "0"; units are powers of 1024. Raises UsageError."""
    return int(_parse(text, flag, _BYTES, "a size such as 500MB or 20GB"))


def parse_age(text: str, flag: str) -> float:
    """Return the seconds of "90d", "12h" or "30m". Raises UsageError."""
    return _parse(text, flag, _SECONDS, "an age such as 30d or 12h")


def keep_alive_s(text: str) -> float:
    """Return the seconds of the setting keep_alive, 0 for off. Raises UsageError."""
    return 0.0 if text in ("", "0") else parse_age(text, "--keep-alive")


def format_size(count: int) -> str:
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration with two digits: 4.2 s, 85 s, 12 min, 3.4 h."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.{0 if seconds >= 10 * unit else 1}f} {name}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"


def format_latency(seconds: float) -> str:
    """Format a time to the first token: 0.034 s, 0.31 s, 4.95 s, 44.6 s."""
    return f"{seconds:.{3 if seconds < 0.1 else 2 if seconds < 10 else 1}f} s"


def counted(count: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_for(count: int) -> str:
    """Return a size that `parse_size` reads as at least this many bytes."""
    units = (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")
    unit, name = next((u, n) for u, n in units if count >= 10 * u or n == "KB")
    return f"{-(-count // unit)}{name}"


def _parse(text: str, flag: str, units: dict[str, int], wanted: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    value = float(match[1]) * units[match[2]] if match and match[2] in units else math.inf
    if not math.isfinite(value):
        raise UsageError(f"{flag} {text!r} is not {wanted}", f"units: {', '.join(u for u in units if u)}")
    return value


def with_kv_line(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about a model for a person: the sizes of KV in one line. See prompt/collection.py: kv_facts."""
    names = ("kv_bytes_per_token", "kv_dtype", "kv_bytes_per_token_in_memory")
    if not all(name in facts for name in names):
        return dict(facts)
    stored, codec, memory = (facts[name] for name in names)
    dtype = "16 bits" if facts["dtype"] == "not stated" else facts["dtype"]
    line = f"{format_size(stored)} stored ({codec}), {format_size(memory)} in memory ({dtype})"
    return {
        "kv_per_token" if name == names[0] else name: line if name == names[0] else value
        for name, value in facts.items()
        if name not in names[1:]
    }
