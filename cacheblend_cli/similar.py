"""Suggestions for a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], see: str, most: int = 1) -> str:
    """Return a hint: at most this many known names that are similar, best first, and the command that lists all."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(similar)}? see: {see}" if similar else f"see: {see}"
