"""Evict unused KV and remove unwanted chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cacheblend_store.format.records import used_at
from cacheblend_store.reader import StoreReader
from cacheblend_store.store import ChunkStore


@dataclass(frozen=True)
class PruneReport:
    keys: tuple[bytes, ...]  # chunks removed
    evicted: tuple[bytes, ...]  # chunks that keep only their text
    bytes: int  # blobs of both


class _Chunk(NamedTuple):
    used: float  # last use, or creation, in seconds since the epoch
    key: bytes
    size: int  # bytes of its blobs
    unwanted: bool


def prune(
    store: ChunkStore,
    *,
    older_than: float | None = None,
    to_bytes: int | None = None,
    orphans: bool = False,
    model: str | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Remove unwanted chunks, and evict KV of unused chunks, whose text is still found and cited.

    orphans: remove chunks that no document refers to (prompt prefixes stay). model: remove chunks of a model, given by
    name or beginning of its fingerprint. older_than: evict KV not used for so many seconds. to_bytes: then evict least
    recently used KV until at most so many bytes are left. Damaged records are left to `verify`. Runs several short
    transactions; an interruption leaves a consistent store.
    """
    now = time.time()
    with store.read() as reader:
        chunks = list(_chunks(reader, orphans=orphans, model=model))
    gone = [chunk for chunk in chunks if chunk.unwanted]
    left = sorted(chunk for chunk in chunks if chunk.size and not chunk.unwanted)
    evicted, total = list[_Chunk](), sum(chunk.size for chunk in left)
    for chunk in left:  # least recently used first
        is_old = older_than is not None and now - chunk.used > older_than
        if not is_old and (to_bytes is None or total <= to_bytes):
            break
        evicted.append(chunk)
        total -= chunk.size
    if not dry_run:
        store.remove_chunks(chunk.key for chunk in gone)
        store.evict_chunks(chunk.key for chunk in evicted)
    removed, size = tuple(chunk.key for chunk in gone), sum(chunk.size for chunk in gone + evicted)
    return PruneReport(removed, tuple(chunk.key for chunk in evicted), size)


def _chunks(reader: StoreReader, *, orphans: bool, model: str | None) -> Iterator[_Chunk]:
    for manifest in reader.manifests():
        use = reader.get("lru", manifest.key)
        used = (used_at(manifest.key, bytes(use)) if use is not None else 0.0) or manifest.created
        referred = manifest.context == "prefix" or any(reader.documents_of(manifest.key))
        unwanted = (orphans and not referred) or (model is not None and manifest.is_of_model(model))
        yield _Chunk(used, manifest.key, manifest.num_bytes, unwanted)
