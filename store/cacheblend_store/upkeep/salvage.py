"""Salvage: what still reads of a damaged store, in a new one that takes its place.

KV is derived data: what does not read, or is not what its digest says, is dropped, and computed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cacheblend_store.errors import BadBlob, StoreCorrupt
from cacheblend_store.format.memos import MEMO_KEYS, Memo, decode_memo
from cacheblend_store.format.records import DocumentRecord
from cacheblend_store.lmdb_file.datafile import replacing
from cacheblend_store.lmdb_file.directory import DATA, unreadable
from cacheblend_store.lmdb_file.pages.commits import salvageable
from cacheblend_store.lmdb_file.translation import again_hint
from cacheblend_store.progress import Progress
from cacheblend_store.reader import StoreReader
from cacheblend_store.state import decode_state
from cacheblend_store.store import ChunkStore


@dataclass(frozen=True)
class SalvageReport:
    """chunks, documents: whose records were kept. lost: chunks that are named and whose KV did not read. sources: where they
    stand, which is to be precomputed again."""

    chunks: int
    documents: int
    lost: int
    sources: tuple[str, ...]


def salvage(path: Path, lock_timeout: float = 30.0, progress: Progress | None = None) -> SalvageReport:
    """Rebuild a store that does not open any more (StoreCorrupt). Needs room for a copy, and nobody who has it open.

    Raises StoreCorrupt when nothing says what the file is, StoreLocked, StoreNoSpace.
    """
    try:
        handle = os.open(path / DATA, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StoreCorrupt(f"the store at {path} has lost its data.mdb", again_hint(path)) from error
    except OSError as error:
        raise unreadable(path / DATA, error) from error
    try:
        size = os.fstat(handle).st_size
        with replacing(path, lock_timeout, size) as new, ChunkStore.open(new, mode="write", force=True) as target:
            return _copy(StoreReader(salvageable(handle, path)), target, progress)
    finally:
        os.close(handle)


def _copy(source: StoreReader, target: ChunkStore, progress: Progress | None) -> SalvageReport:
    keys, lost = list(_keys(source, "chunks")), dict[bytes, str]()  # lost: chunk -> source, "" where nothing says
    for done, key in enumerate(keys, 1):
        of = _copy_chunk(source, target, key)
        if of is not None:
            lost[key] = of
        if progress is not None:
            progress(done, len(keys))
    documents: list[DocumentRecord] = []
    for key in _keys(source, "documents"):
        with suppress(StoreCorrupt):
            documents += filter(None, [source.document(key)])
    target.put_documents(documents)
    target.put_memos(list(_memos(source)))
    with suppress(StoreCorrupt):
        state = decode_state(source.meta)
        target.set_max_bytes(state.max_bytes if state else 0)
    with target.read() as reader:
        kept = set(reader.keys_from(b""))
    for document in documents:  # which know better than a chunk where it stands now
        lost |= {c.key: document.source for c in document.chunks if c.key in lost or c.key not in kept}
    return SalvageReport(len(kept), len(documents), len(lost), tuple(sorted(filter(None, set(lost.values())))))


def _copy_chunk(source: StoreReader, target: ChunkStore, key: bytes) -> str | None:
    """None when all that the chunk had was there, else its source. Of one whose KV does not read the text is kept."""
    manifest = None
    try:
        manifest = source.manifest(key)
        if manifest is not None and manifest.has_kv:
            for layer in range(manifest.num_layers):
                source.layer(manifest, layer)
            target.put_chunk(manifest, [source.blob(manifest, layer) for layer in range(manifest.num_layers)])
            return None
        whole = manifest is not None
    except (BadBlob, StoreCorrupt):
        whole = False
    target.put_records(filter(None, [manifest]))
    return None if whole else manifest.source if manifest else ""


def _memos(source: StoreReader) -> Iterator[Memo]:
    for key in _keys(source, "meta"):
        if key.startswith(MEMO_KEYS):
            with suppress(BadBlob, StoreCorrupt):
                memo = decode_memo(key, source.get("meta", key) or b"")
                if memo is not None:
                    yield memo


def _keys(source: StoreReader, database: str) -> Iterator[bytes]:
    """Keys of a database, those of pages that do not read left out."""
    with suppress(StoreCorrupt):
        for node in source.pages.nodes(database, skip_damaged=True):
            yield node.key
