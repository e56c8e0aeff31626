"""A shared tier: chunk KV in an object store, behind the local store. One object a chunk."""

from cacheblend_store.tier.objects import open_tier
from cacheblend_store.tier.protocol import Tier, TierObject
from cacheblend_store.tier.shared import SharedTier, TierCounts

__all__ = ["SharedTier", "Tier", "TierCounts", "TierObject", "open_tier"]
