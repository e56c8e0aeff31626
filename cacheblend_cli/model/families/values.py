"""Values of config.json: recognising numbers, and showing values in messages."""

from __future__ import annotations

from typing import Any

from cacheblend_cli.errors import UsageError

LARGEST = {
    "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "altup_num_inputs": 1 << 6,
}  # fmt: skip
"""Limits of the numbers in a config that something is made of one by one. No model comes near."""
LARGEST_INTEGER = (1 << 31) - 1
MOST_EXPERTS = 1 << 17
"""Limit of the experts of all layers."""


def shown(value: Any) -> str:
    """Return the value as JSON, shortened if it is long."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    """Return whether this is a finite number that fits a float; true and false are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 <= value <= 1e300


def wrong_value(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(
        f"{name} in config.json is {shown(value)}; it must be {wanted}",
        "correct config.json, or fetch the checkpoint again",
    )
