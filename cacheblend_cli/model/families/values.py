"""Values of config.json: which are numbers, and how they are shown in a message."""

from __future__ import annotations

from typing import Any

from cacheblend_cli.errors import UsageError


def shown(value: Any) -> str:
    """The value as JSON would write it, cut where it is long."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    """A finite number that a float can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 <= value <= 1e300


def wrong_value(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(
        f"{name} in config.json is {shown(value)}, and has to be {wanted}",
        "correct config.json, or fetch the checkpoint again",
    )
