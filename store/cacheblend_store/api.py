"""Public names of the package, apart from upkeep's. `cacheblend_store` gives them on first use."""
# ruff: noqa: F401

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
from cacheblend_store.reader import LayerReads, StoreReader, Version
from cacheblend_store.store import ChunkStore
