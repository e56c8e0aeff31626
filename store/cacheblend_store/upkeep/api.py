"""Public names of upkeep. `cacheblend_store` gives them on first use."""
# ruff: noqa: F401

from cacheblend_store.upkeep.prune import PruneReport, prune
from cacheblend_store.upkeep.rewriting import SalvageReport, compact, salvage
from cacheblend_store.upkeep.stats import Amount, StoreStats, stats
from cacheblend_store.upkeep.verify import Finding, VerifyReport, verify
