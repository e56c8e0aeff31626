"""Sources of stored KV: a chunk store, or another collection of chunks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from cacheblend_store import ChunkManifest, LayerReads, Version


class ChunkReader(Protocol):
    """A consistent snapshot of a source.

    Every method raises StoreError for damaged or unavailable data. `StoreReader` is one. version: equal versions of
    sources have equal contents, None if that is not known.
    """

    @property
    def version(self) -> Version | None: ...

    def manifest(self, key: bytes, /) -> ChunkManifest | None:
        """Return the manifest stored under the key, or None."""
        ...

    def locate(self, reads: LayerReads, /) -> None:
        """Look up where the layers are, so that `read_layers` need not."""
        ...

    def read_layers(self, reads: LayerReads, group: int, buffer: memoryview, /) -> None:
        """Copy a group of a chunk's layers to its places in a buffer, and check the copy. Several threads call it at
        once."""
        ...

    def state_of(self, manifest: ChunkManifest, /) -> list[memoryview]:
        """Return the data of each tensor of the state that recurrent layers have after the chunk."""
        ...


class KVSource(Protocol):
    """A source of stored KV. `ChunkStore` is one."""

    def read(self) -> AbstractContextManager[ChunkReader]:
        """Return a reader. Another thread may close it than the one that opened it."""
        ...


class BadChunk(Exception):
    """A cached chunk whose KV cannot be used: missing, damaged or foreign. The caller computes it instead.

    is_agreed: with tensor parallelism all ranks raise it, see `loading.agree`.
    """

    is_agreed = True

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key, self.reason = key, reason
