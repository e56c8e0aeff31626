"""Sources of stored KV: a chunk store, or anything else that keeps chunks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from cacheblend_store import ChunkManifest


class ChunkReader(Protocol):
    """A consistent snapshot of a source, used by one thread.

    Every method raises StoreError for damaged or unavailable data. `StoreReader` is one.
    """

    def manifest(self, key: bytes, /) -> ChunkManifest | None:
        """Return the manifest stored under the key, or None."""
        ...

    def copy_layer(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview], /) -> None:
        """Copy a layer's tensors (`blobs.blob_spec`) to `targets`, each of exactly its size, and check the copies."""
        ...


class KVSource(Protocol):
    """A source of stored KV, read by several loader threads at once. `ChunkStore` is one."""

    def read(self) -> AbstractContextManager[ChunkReader]:
        """Return a reader for the calling thread."""
        ...


class BadChunk(Exception):
    """A cached chunk whose KV cannot be used: missing, damaged or foreign. The caller computes it instead.

    is_agreed: with tensor parallelism all ranks raise it, see `loader.agree`.
    """

    is_agreed = True

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key, self.reason = key, reason
