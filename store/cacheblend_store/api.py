"""Public names of the package, in one place. `cacheblend_store` gives them on first use."""

from cacheblend_store.errors import (
    AmbiguousId,
    BadBlob,
    ChunkNotFound,
    CodecError,
    StoreCorrupt,
    StoreError,
    StoreFormat,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreNoSpace,
    StoreNotFound,
    StorePermission,
    TierError,
    TierNotFound,
    TierUsage,
)  # fmt: skip
from cacheblend_store.format.keys import FORMAT_VERSION, KeyParts, chunk_key, collection_id
from cacheblend_store.format.records import (
    COLLECTION,
    NOWHERE,
    ChunkManifest,
    DocumentChunk,
    DocumentRecord,
    Locator,
    Memo,
)  # fmt: skip
from cacheblend_store.format.summaries import DocumentSummary
from cacheblend_store.store import ChunkStore, StoreReader
from cacheblend_store.upkeep.prune import PruneReport, prune
from cacheblend_store.upkeep.rewriting import SalvageReport, compact, salvage
from cacheblend_store.upkeep.stats import Amount, StoreStats, stats
from cacheblend_store.upkeep.verify import Finding, VerifyReport, verify

__all__ = [
    "COLLECTION", "FORMAT_VERSION", "NOWHERE", "AmbiguousId", "Amount", "BadBlob", "ChunkManifest", "ChunkNotFound",
    "ChunkStore", "CodecError", "DocumentChunk", "DocumentRecord", "DocumentSummary", "Finding", "KeyParts",
    "Locator", "Memo", "PruneReport", "SalvageReport", "StoreCorrupt", "StoreError", "StoreFormat", "StoreFull",
    "StoreIOError", "StoreLocked", "StoreNoSpace", "StoreNotFound", "StorePermission", "StoreReader", "StoreStats",
    "TierError", "TierNotFound", "TierUsage", "VerifyReport", "chunk_key", "collection_id", "compact", "prune",
    "salvage", "stats", "verify",
]  # fmt: skip
