"""Salvage: what the ordinary reader still reads of a damaged store, in a new one that takes its place.

KV is derived data: what does not read, or is not what its digest says, is dropped, and computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cacheblend_store.errors import BadBlob, StoreCorrupt
from cacheblend_store.format.memos import MEMO_KEYS, Memo, decode_memo
from cacheblend_store.format.records import ChunkManifest
from cacheblend_store.lmdb_file.datafile import replacing
from cacheblend_store.lmdb_file.directory import DATA, unreadable
from cacheblend_store.lmdb_file.pages.commits import salvageable
from cacheblend_store.lmdb_file.translation import again_hint
from cacheblend_store.progress import Progress
from cacheblend_store.reader import StoreReader
from cacheblend_store.state import decode_state
from cacheblend_store.store import ChunkStore

T = TypeVar("T")


@dataclass(frozen=True)
class SalvageReport:
    """chunks, documents: whose records were kept. lost: chunks that are named and have no KV now, but for what was evicted.
    sources: where they stand, which is to be precomputed again."""

    chunks: int
    documents: int
    lost: int
    sources: tuple[str, ...]


def salvage(path: Path, lock_timeout: float = 30.0, progress: Progress | None = None) -> SalvageReport:
    """Rebuild a store that does not open any more (StoreCorrupt). Needs room for a copy, and nobody who has it open.

    Raises StoreCorrupt when nothing says what the file is, StoreLocked, StoreNoSpace, StorePermission.
    """
    try:
        file = (path / DATA).open("rb", buffering=0)
    except FileNotFoundError as error:
        raise StoreCorrupt(f"the store at {path} has lost its data.mdb", again_hint(path)) from error
    except OSError as error:
        raise unreadable(path / DATA, error) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        with replacing(path, lock_timeout, size) as new, ChunkStore.open(new, mode="write", force=True) as target:
            return _copy(StoreReader(salvageable(file.fileno(), path)), target, progress)


def _copy(source: StoreReader, target: ChunkStore, progress: Progress | None) -> SalvageReport:
    keys, lost = list(_readable(source, "chunks", bytes)), dict[bytes, str]()  # lost: chunk -> where it stands
    for done, key in enumerate(keys, 1):
        with suppress(BadBlob, StoreCorrupt):
            manifest = source.manifest(key)
            if manifest is not None and not _copy_chunk(source, target, manifest):
                lost[key] = manifest.source if manifest.context != "prefix" else ""  # any run computes that
        if progress is not None:
            progress(done, len(keys))
    documents = list(_readable(source, "documents", source.document))
    target.put_documents(documents)
    target.put_memos(list(_readable(source, "meta", lambda key: _memo(source, key))))
    with suppress(StoreCorrupt):
        state = decode_state(source.meta)
        target.set_max_bytes(state.max_bytes if state else 0)
    with target.read() as reader:
        kept = set(reader.keys_from(b""))
    for document in documents:  # which know better than a chunk where it stands now
        lost |= {c.key: document.source for c in document.chunks if c.key in lost or c.key not in kept}
    return SalvageReport(len(kept), len(documents), len(lost), tuple(sorted(set(filter(None, lost.values())))))


def _copy_chunk(source: StoreReader, target: ChunkStore, manifest: ChunkManifest) -> bool:
    """Whether all that the chunk is to have was there. Of one whose KV does not read, or was not computed yet in the commit
    that is left, the text is kept."""
    with suppress(BadBlob, StoreCorrupt):
        if manifest.has_kv:
            for layer in range(manifest.num_layers):
                source.layer(manifest, layer)
            target.put_chunk(manifest, [source.blob(manifest, layer) for layer in range(manifest.num_layers)])
            return True
    target.put_records([manifest])
    return manifest.evicted


def _memo(source: StoreReader, key: bytes) -> Memo | None:
    return decode_memo(key, source.get("meta", key) or b"") if key.startswith(MEMO_KEYS) else None


def _readable(source: StoreReader, database: str, read: Callable[[bytes], T | None]) -> Iterator[T]:
    """What is read under the keys of a database, without what does not read and those of pages that do not."""
    with suppress(StoreCorrupt):
        for node in source.pages.nodes(database, skip_damaged=True):
            with suppress(BadBlob, StoreCorrupt):
                found = read(node.key)
                if found is not None:
                    yield found
