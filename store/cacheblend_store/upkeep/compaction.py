"""Compaction: data.mdb without its free pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.datafile import clear_making
from cacheblend_store.lmdb_file.filesystem import DATA, check_file, check_space
from cacheblend_store.lmdb_file.translation import translated
from cacheblend_store.progress import Progress

if TYPE_CHECKING:
    from cacheblend_store.store import ChunkStore


def compact(store: ChunkStore, progress: Progress | None = None) -> tuple[int, int]:
    """Copy what is live into a new file and rename it over the old one; (bytes before, bytes after).

    Needs room for the copy beside the original, and no other process that has the store open. Killed or out of power
    anywhere, the store is the old one or the new one, whole. The copy is checked before it takes the old one's place.
    """
    store._require_writable()
    data = store.path / DATA
    env = store._environment()

    def make(folder: Path) -> None:
        with translated(store.path):
            env.lmdb.copy(str(folder), compact=True)
        check_file(folder / DATA)
        if progress is not None:
            progress(1, 2)

    with locks.writer_lock(store.path, store._lock_timeout):
        clear_making(store.path)
        check_file(data)
        before = data.stat().st_size
        check_space(store.path, before - store.stats()["free_bytes"])
        env.replace_file(make)
    if progress is not None:
        progress(2, 2)
    return before, data.stat().st_size
