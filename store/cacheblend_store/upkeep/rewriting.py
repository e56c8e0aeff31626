"""Replace data.mdb by a new file: without free pages, or with the readable records of a damaged file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cacheblend_store.errors import BadBlob, StoreCorrupt, StoreError
from cacheblend_store.lmdb_file.datafile import compact_copy, replacing
from cacheblend_store.lmdb_file.directory import DATA, check_directory, open_data
from cacheblend_store.lmdb_file.pages.commits import salvageable
from cacheblend_store.reader import StoreReader
from cacheblend_store.state import check_format, read_identity
from cacheblend_store.store import ChunkStore
from cacheblend_store.upkeep import Progress

T = TypeVar("T")


def compact(store: ChunkStore) -> tuple[int, int]:
    """Copy live pages into a new file and rename it over the old one. Returns (bytes before, bytes after).

    Needs disk space for the copy, and no other process may have the store open. If it is interrupted anywhere, the
    store is the old one or the new one, whole. The copy is opened, and so checked, before the rename.
    """
    store.require_writable()
    data = store.path / DATA
    with store.read() as reader:
        before, free = data.stat().st_size, reader.pages.free_bytes
    with store.set_aside(), replacing(store.path, store.lock_timeout, before - free) as folder:
        compact_copy(store.path, folder)
        ChunkStore.open(folder, force=True).close()
    return before, data.stat().st_size


@dataclass(frozen=True)
class SalvageReport:
    chunks: int  # records kept
    documents: int  # records kept
    lost: int  # chunks that lost at least their KV
    sources: tuple[str, ...]  # documents of the lost chunks, to precompute again


def salvage(
    path: Path, lock_timeout: float = 30.0, progress: Progress | None = None, *, force: bool = False
) -> SalvageReport:
    """Rebuild a store that cannot be opened any more (StoreCorrupt).

    Needs disk space for a copy, and no other process may have the store open. Records that cannot be read or do not
    match their digests are dropped; they are computed again. force: as in `ChunkStore.open`. Raises StoreCorrupt if the
    file cannot be identified, StoreFormat, StoreLocked, StoreNoSpace, StorePermission.
    """
    check_directory(path, write=True, create=False, force=force)
    with (
        os.fdopen(open_data(path), "rb", buffering=0) as file,
        replacing(path, lock_timeout, os.fstat(file.fileno()).st_size) as new,
        ChunkStore.open(new, mode="write", force=True) as target,
    ):
        source = StoreReader(salvageable(file.fileno(), path))
        with suppress(StoreCorrupt):
            check_format(source.get, str(path))  # with another format, no record could be read and all would be dropped
        report = _copy(source, target, progress)
        with suppress(StoreError):
            target.set_identity(read_identity(source.get, str(path)))  # else the rebuilt store is taken for another one
        return report


def _copy(source: StoreReader, target: ChunkStore, progress: Progress | None) -> SalvageReport:
    lost = dict[bytes, str]()  # chunk -> its document
    for done, manifest in enumerate(_readable(source, "chunks", source.manifest), 1):
        try:
            target.put_chunk(manifest, [source.blob(manifest, layer) for layer in range(manifest.num_blobs)])
        except (BadBlob, StoreCorrupt):  # keep at least its text
            target.put_records([manifest])
            if not manifest.evicted:
                lost[manifest.key] = manifest.source if manifest.context != "prefix" else ""
        if progress is not None:
            progress(done, source.entries("chunks"))
    documents = list(_readable(source, "documents", source.document))
    target.put_documents(documents)
    target.put_memos(list(_readable(source, "meta", source.memo)))
    with suppress(StoreCorrupt):
        target.set_max_bytes(source.state().max_bytes)
    with target.read() as reader:
        kept = set(reader.keys_from(b""))
    for document in documents:  # a document record is more current than the name in a manifest
        lost |= {c.key: document.source for c in document.chunks if c.key in lost or c.key not in kept}
    return SalvageReport(len(kept), len(documents), len(lost), tuple(sorted(set(lost.values()) - {""})))


def _readable(source: StoreReader, database: str, read: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the records of a database that can be read; damaged pages and records are skipped."""
    with suppress(StoreCorrupt):
        for node in source.pages.nodes(database, skip_damaged=True):
            with suppress(BadBlob, StoreCorrupt):
                found = read(node.key)
                if found is not None:
                    yield found
