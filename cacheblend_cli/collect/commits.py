"""Collected chunks into the store, several in one transaction where they come faster than the disk syncs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Set

from cacheblend_store import ChunkManifest, ChunkStore, StoreFull, StoreNoSpace
from cacheblend_store.store import PutStatus

GROUP_BYTES = 128 << 20
GROUP_SECONDS = 1.0
Whole = tuple[ChunkManifest, Sequence[bytes]]
"""A chunk with its blobs, one a layer."""


def commit(
    store: ChunkStore, chunks: Iterable[Whole], keep: Set[bytes] = frozenset()
) -> Iterator[tuple[bytes, PutStatus]]:
    """Store the chunks; the key of each and what the store did, once it is durable. keep: keys of chunks that are not evicted
    for these. Raises as `ChunkStore.put_chunks`.

    Chunks wait for company until the last commit is GROUP_SECONDS old or GROUP_BYTES wait: a slow computation commits
    every chunk at once, and a fast one does not wait for the disk with each.
    """
    waiting, num_bytes, committed_at = list[Whole](), 0, time.monotonic()
    for chunk in chunks:
        waiting.append(chunk)
        num_bytes += sum(map(len, chunk[1]))
        if num_bytes >= GROUP_BYTES or time.monotonic() - committed_at >= GROUP_SECONDS:
            yield from _put(store, waiting, keep)
            waiting, num_bytes, committed_at = [], 0, time.monotonic()
    if waiting:
        yield from _put(store, waiting, keep)


def _put(store: ChunkStore, group: Sequence[Whole], keep: Set[bytes]) -> Iterator[tuple[bytes, PutStatus]]:
    try:
        statuses = store.put_chunks(group, keep)
    except (StoreFull, StoreNoSpace):
        if len(group) == 1:
            raise
        for one in group:  # no room for all of them at once: as many as there is room for, which evict one another
            yield from _put(store, [one], keep)
    else:
        yield from zip((manifest.key for manifest, _ in group), statuses, strict=True)
