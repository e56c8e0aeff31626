"""Public names of upkeep. `cacheblend_store` gives them on first use."""

from cacheblend_store.upkeep.prune import PruneReport, prune
from cacheblend_store.upkeep.rewriting import SalvageReport, compact, salvage
from cacheblend_store.upkeep.stats import Amount, StoreStats, stats
from cacheblend_store.upkeep.verify import Finding, VerifyReport, verify

__all__ = [
    "Amount", "Finding", "PruneReport", "SalvageReport", "StoreStats", "VerifyReport", "compact", "prune", "salvage",
    "stats", "verify",
]  # fmt: skip
