"""Compaction: data.mdb without its free pages."""

from __future__ import annotations

from cacheblend_store.lmdb_file.datafile import compact_copy, replacing
from cacheblend_store.lmdb_file.directory import DATA
from cacheblend_store.store import ChunkStore


def compact(store: ChunkStore) -> tuple[int, int]:
    """Copy what is live into a new file and rename it over the old one; (bytes before, bytes after).

    Needs room for the copy beside the original, and nobody else who has the store open. Killed or out of power
    anywhere, the store is the old one or the new one, whole. The copy is opened, and so checked, before the rename.
    """
    store.require_writable()
    data = store.path / DATA
    with store.read() as reader:
        before, free = data.stat().st_size, reader.pages.free_bytes
    with store.set_aside(), replacing(store.path, store.lock_timeout, before - free) as folder:
        compact_copy(store.path, folder)
        ChunkStore.open(folder, force=True).close()
    return before, data.stat().st_size
