"""Commit collected chunks, in groups if they come faster than the disk can sync."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence

from cacheblend_store import ChunkManifest, ChunkStore, StoreFull, StoreNoSpace
from cacheblend_store.store import PutStatus

GROUP_BYTES = 128 << 20
GROUP_SECONDS = 1.0
# A commit into a large store takes seconds. Wait _COMMIT_SHARE times as long before the next, at most _MOST *
# GROUP_SECONDS.
_COMMIT_SHARE, _MOST = 4, 5
Whole = tuple[ChunkManifest, Sequence[bytes]]
"""A chunk with its blobs, one per layer."""


def commit(
    store: ChunkStore,
    chunks: Iterable[Whole],
    keep: Container[bytes] = frozenset(),
    every_s: float | None = None,
    *,
    only_known: bool = False,
) -> Iterator[tuple[bytes, PutStatus]]:
    """Store the chunks. Yields each key and status once it is durable. Raises the errors of `ChunkStore.put_chunks`.

    Chunks wait until the last commit is every_s seconds old (up to five times that if commits are slow) or they reach
    GROUP_BYTES. So a slow computation commits every chunk at once, and a fast one does not wait for the disk after each
    chunk.

    keep: keys of chunks that must not be evicted to make room. every_s: None for GROUP_SECONDS; 0 commits each chunk
    by itself. only_known: see `ChunkStore.put_chunks`.
    """
    every_s = GROUP_SECONDS if every_s is None else every_s
    waiting, num_bytes, committed_at, least = list[Whole](), 0, time.monotonic(), every_s
    for chunk in chunks:
        waiting.append(chunk)
        num_bytes += sum(map(len, chunk[1]))
        if num_bytes >= GROUP_BYTES or time.monotonic() - committed_at >= least:
            began = time.monotonic()
            done = list(_put(store, waiting, keep, only_known))
            took = time.monotonic() - began
            yield from done
            waiting, num_bytes, committed_at = [], 0, time.monotonic()
            least = every_s * min(max(1.0, _COMMIT_SHARE * took), _MOST)
    if waiting:
        yield from _put(store, waiting, keep, only_known)


def _put(
    store: ChunkStore, group: Sequence[Whole], keep: Container[bytes], only_known: bool
) -> Iterator[tuple[bytes, PutStatus]]:
    try:
        statuses = store.put_chunks(group, keep, only_known=only_known)
    except (StoreFull, StoreNoSpace):
        if len(group) == 1:
            raise
        for one in group:  # no room for all at once: put them one by one, each evicting others
            yield from _put(store, [one], keep, only_known)
    else:
        yield from zip((manifest.key for manifest, _ in group), statuses, strict=True)
