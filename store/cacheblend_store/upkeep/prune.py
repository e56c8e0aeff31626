"""Removing what is no longer wanted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import used_at
from cacheblend_store.reader import StoreReader

if TYPE_CHECKING:
    from cacheblend_store.store import ChunkStore

_BATCH = 512  # chunks a transaction


@dataclass(frozen=True)
class PruneReport:
    """keys: what was (or, in a dry run, would be) removed. bytes: of their blobs."""

    keys: tuple[bytes, ...]
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
    """Remove every chunk that one of the conditions names.

    older_than: seconds since its last use. orphans: no document refers to it (the KV of a prompt's prefix is none).
    model: its name, or a beginning of its fingerprint. to_bytes: after all that, least recently used chunks until the
    blobs left have no more bytes than this. Damaged records are left to `verify`. Several short transactions: what an
    interruption leaves is consistent.
    """
    now = time.time()
    with store.read() as reader:
        candidates = _candidates(reader, model)
    gone = [
        c
        for c in candidates
        if (older_than is not None and now - c.used > older_than)
        or (orphans and not c.referred and c.context != "prefix")
        or c.of_model
    ]
    if to_bytes is not None:
        gone += _beyond(candidates, {c.key for c in gone}, to_bytes)
    if not dry_run:
        for start in range(0, len(gone), _BATCH):
            store.remove_chunks(c.key for c in gone[start : start + _BATCH])
    return PruneReport(tuple(c.key for c in gone), sum(c.size for c in gone))


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


def _beyond(candidates: list[_Candidate], gone: set[bytes], to_bytes: int) -> list[_Candidate]:
    left = [c for c in candidates if c.key not in gone]
    total, more = sum(c.size for c in left), []
    for candidate in sorted(left, key=lambda c: (c.used, c.key)):
        if total <= to_bytes:
            break
        total -= candidate.size
        more.append(candidate)
    return more
