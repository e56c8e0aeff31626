"""A shared tier: chunk KV in an object store, as a second level behind the local store. One object per chunk."""

from cacheblend_store.tier.object_stores import SCHEMES, ObjectStore, TierObject
from cacheblend_store.tier.objects import Tier, open_tier
from cacheblend_store.tier.shared import SharedTier, TierCounts

__all__ = ["SCHEMES", "ObjectStore", "SharedTier", "Tier", "TierCounts", "TierObject", "open_tier"]
