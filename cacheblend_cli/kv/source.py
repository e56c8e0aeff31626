"""Where stored KV comes from. A chunk store is such a source, and so may be anything else that keeps chunks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from cacheblend_store import ChunkManifest


class KVReader(Protocol):
    """One look into a source, during which nothing in it changes. It belongs to one thread.

    Every method raises StoreError for what is damaged or cannot be had. `StoreReader` is one.
    """

    def manifest(self, key: bytes, /) -> ChunkManifest | None:
        """What is stored under the key, None: nothing."""
        ...

    def copy_layer(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview], /) -> None:
        """Copy a layer's tensors (`blobs.blob_spec`) to `targets`, each of just its size, and check the copies."""
        ...


class KVSource(Protocol):
    """What loaders read from, several threads at once. `ChunkStore` is one."""

    def read(self) -> AbstractContextManager[KVReader]:
        """A reader of the thread that asks."""
        ...


class BadChunk(Exception):
    """A cached chunk whose KV cannot be used: missing, damaged or foreign. The caller computes it instead."""

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key, self.reason = key, reason
