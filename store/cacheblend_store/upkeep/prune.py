"""Letting go of KV that is not used, and of chunks that nobody wants."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import used_at
from cacheblend_store.reader import StoreReader
from cacheblend_store.store import ChunkStore

_BATCH = 512  # chunks a transaction


@dataclass(frozen=True)
class PruneReport:
    """keys: of chunks that were (or, in a dry run, would be) removed; evicted: of those whose text stays. bytes: of the
    blobs of both."""

    keys: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    bytes: int


@dataclass(frozen=True)
class _Candidate:
    key: bytes
    used: float
    size: int
    of_model: bool
    referred: bool
    context: str


def prune(
    store: ChunkStore,
    *,
    older_than: float | None = None,
    to_bytes: int | None = None,
    orphans: bool = False,
    model: str | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Remove the chunks that nobody wants, and the KV of those that are not used, whose text is still found and cited.

    orphans: chunks that no document refers to (the KV of a prompt's prefix is none). model: those of a model, by its name
    or a beginning of its fingerprint. older_than: the KV of what was not used for so many seconds. to_bytes: after all
    that, the KV of the least recently used until no more bytes of it than this are left. Damaged records are left to
    `verify`. Several short transactions: what an interruption leaves is consistent.
    """
    now = time.time()
    with store.read() as reader:
        candidates = _candidates(reader, model)
    gone = [c for c in candidates if (orphans and not c.referred and c.context != "prefix") or c.of_model]
    goes = {c.key for c in gone}
    left = [c for c in candidates if c.size and c.key not in goes]
    evicted = [c for c in left if older_than is not None and now - c.used > older_than]
    if to_bytes is not None:
        old = {c.key for c in evicted}
        evicted += _beyond([c for c in left if c.key not in old], to_bytes)
    if not dry_run:
        for chosen, let_go in ((gone, store.remove_chunks), (evicted, store.evict_chunks)):
            for start in range(0, len(chosen), _BATCH):
                let_go(c.key for c in chosen[start : start + _BATCH])
    size = sum(c.size for c in gone + evicted)
    return PruneReport(tuple(c.key for c in gone), tuple(c.key for c in evicted), size)


def _candidates(reader: StoreReader, model: str | None) -> list[_Candidate]:
    referred = {key[:KEY_BYTES] for key in reader.keys_from(b"", "refs")}
    found = []
    for key in reader.keys_from(b""):
        try:
            manifest = reader.manifest(key)
        except BadBlob:
            continue
        if manifest is not None:
            use = reader.get("lru", key)
            used = (used_at(key, bytes(use)) if use is not None else 0.0) or manifest.created
            found.append(
                _Candidate(
                    key,
                    used,
                    manifest.num_bytes,
                    model is not None and manifest.is_of_model(model),
                    key in referred,
                    manifest.context,
                )
            )
    return found


def _beyond(candidates: list[_Candidate], to_bytes: int) -> list[_Candidate]:
    total, more = sum(c.size for c in candidates), []
    for candidate in sorted(candidates, key=lambda c: (c.used, c.key)):
        if total <= to_bytes:
            break
        total -= candidate.size
        more.append(candidate)
    return more
