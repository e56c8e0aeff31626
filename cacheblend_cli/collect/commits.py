"""Collected chunks into the store, several in one transaction where they come faster than the disk syncs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set

from cacheblend_store import ChunkManifest, ChunkStore, StoreFull, StoreNoSpace
from cacheblend_store.store import PutStatus

GROUP_BYTES = 128 << 20
GROUP_SECONDS = 0.25
Committed = tuple[bytes, PutStatus, int]
"""Key, what the store did, bytes of the blobs."""


class ChunkCommits:
    """Chunks wait for company until the last commit is GROUP_SECONDS old or GROUP_BYTES wait: a slow computation commits
    every chunk at once, and a fast one does not wait for the disk with each. What is given back is durable."""

    def __init__(self, store: ChunkStore, keep: Set[bytes] = frozenset()) -> None:
        """keep: keys of chunks that are not evicted for these."""
        self._store, self._keep = store, keep
        self._waiting: list[tuple[ChunkManifest, Sequence[bytes]]] = []
        self._num_bytes = 0
        self._committed_at = 0.0

    def add(self, manifest: ChunkManifest, blobs: Sequence[bytes]) -> Iterator[Committed]:
        """Take one more; what was committed by it, which may be nothing. Raises as `ChunkStore.put_chunks`."""
        self._waiting.append((manifest, blobs))
        self._num_bytes += sum(map(len, blobs))
        if self._num_bytes >= GROUP_BYTES or time.monotonic() - self._committed_at >= GROUP_SECONDS:
            yield from self.flush()

    def flush(self) -> Iterator[Committed]:
        """Commit what waits."""
        group, self._waiting, self._num_bytes = self._waiting, [], 0
        try:
            statuses = self._store.put_chunks(group, self._keep) if group else []
        except (StoreFull, StoreNoSpace):
            if len(group) == 1:
                raise
            statuses = []  # no room for all of them at once: as many as there is room for, which evict one another
        for number, (manifest, blobs) in enumerate(group):
            status = statuses[number] if statuses else self._store.put_chunks([(manifest, blobs)], self._keep)[0]
            yield manifest.key, status, sum(map(len, blobs))
        self._committed_at = time.monotonic()
