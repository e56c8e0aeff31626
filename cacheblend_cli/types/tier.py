"""TierUse: use of a shared tier by one prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierUse:
    """Counts of a tier for one prompt."""

    asked: int  # chunks without KV in the store
    found: int  # asked chunks that the tier has
    taken: int  # chunks loaded whole
    lost: int  # chunks found, but late, unreadable or damaged
    num_bytes: int
    seconds: float  # from the first request to the last answer
