"""JSON of records that anybody may have written: bounded before it is parsed, and of the types that are expected after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_COUNT = 1 << 53
_MAX_CONTAINERS = 1 << 20  # lists and objects: each takes twenty times its two bytes
Check = Callable[[Any], bool]


def load_object(text: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError, whatever else the text is."""
    if len(text) > max_bytes or text.count("[") + text.count("{") > _MAX_CONTAINERS:
        raise ValueError("the record is longer than any record")
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("the record is deeper than any record") from error
    if not isinstance(data, dict):
        raise ValueError("the record is no object")
    return data


def check_fields(values: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Raises ValueError naming the first field that is not what its check wants. Every field must be there."""
    for name, check in checks.items():
        if not check(values[name]):
            raise ValueError(f"{name} is not what it should be")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """A whole number from 0 on that JSON carries exactly."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_size(value: Any) -> bool:
    """A dimension of a tensor."""
    return type(value) is int and 0 < value <= 1 << 20


def is_moment(value: Any) -> bool:
    """Seconds since the epoch."""
    return type(value) in (int, float) and math.isfinite(value)


def are_counts(value: Any) -> bool:
    return all(map(is_count, value))


def is_span(value: Any) -> bool:
    return len(value) == 2 and are_counts(value)
