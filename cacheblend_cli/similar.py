"""Suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], see: str, most: int = 1) -> str:
    """Return a hint with up to `most` similar known names, best first. see: command that lists all names."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(similar)}? see: {see}" if similar else f"see: {see}"
