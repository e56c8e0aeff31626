"""The chunk-KV store on LMDB: records, digests, one transaction a chunk. Knows no model and imports no torch."""

from cacheblend_store.errors import (
    AmbiguousId,
    BadBlob,
    ChunkNotFound,
    StoreCorrupt,
    StoreError,
    StoreFormat,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreNoSpace,
    StoreNotFound,
    StorePermission,
)
from cacheblend_store.keys import FORMAT_VERSION, KeyParts, chunk_key, collection_id
from cacheblend_store.records import ChunkManifest, DocumentChunk, DocumentRecord
from cacheblend_store.store import ChunkStore, StoreReader

__all__ = [
    "FORMAT_VERSION",
    "AmbiguousId",
    "BadBlob",
    "ChunkManifest",
    "ChunkNotFound",
    "ChunkStore",
    "DocumentChunk",
    "DocumentRecord",
    "KeyParts",
    "StoreCorrupt",
    "StoreError",
    "StoreFormat",
    "StoreFull",
    "StoreIOError",
    "StoreLocked",
    "StoreNoSpace",
    "StoreNotFound",
    "StorePermission",
    "StoreReader",
    "chunk_key",
    "collection_id",
]
