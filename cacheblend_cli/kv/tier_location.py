"""Tiers by their URL, in object stores of other distributions too (docs/extending.md)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from cacheblend_store.tier import SCHEMES, Tier
from cacheblend_store.tier import open_tier as open_own

from cacheblend_cli.extensions import installed, load


def open_tier(url: str, key_file: str | Path | None = None, *, create: bool = True) -> Tier:
    """Return the tier at a URL, as the store's `open_tier` does. A scheme that the store does not know is the name of
    an extension, which opens the object store. Raises TierUsage, TierNotFound, UsageError."""
    opener = load("source", urlsplit(url).scheme) if is_extensions(url) else None
    return open_own(url, key_file, create=create, opener=opener)


def is_extensions(url: str) -> bool:
    """Return whether an extension opens the tiers of this scheme."""
    scheme = urlsplit(url).scheme
    return scheme not in SCHEMES and any(point.name == scheme for point in installed("source"))
