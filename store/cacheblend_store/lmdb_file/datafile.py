"""Open data.mdb with LMDB, and replace it: a new file is written next to it, then renamed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.directory import DATA, LOCK, MAKING, check_space, sync_folder, sync_handle, unreadable
from cacheblend_store.lmdb_file.pages.commits import newest
from cacheblend_store.lmdb_file.pages.reader import DATABASES
from cacheblend_store.lmdb_file.translation import MAX_READERS, system_errors, translated
from cacheblend_store.private_files import InsecurePath, check_files, open_file

MAP_SIZE = 16 << 40  # maximum; takes address space, not disk
_LEAST_MAP = 64 << 20
Fill = Callable[[Any, dict[str, Any]], None]
"""Writes the first records of a new store. Arguments: py-lmdb's transaction, and database handles by name."""


def open_lmdb(store: Path) -> Any:
    """Open an LMDB environment: sync on, no writemap, LMDB 0.9's format. A replacement file is synced once, before its
    rename.

    The map is twice the size of the file system, which can grow while the store is open, or half of a limited address
    space. It does not grow, so that a process with many open stores has address space left.
    """
    try:
        check_files(store / DATA, store / LOCK)
    except InsecurePath as error:
        raise unreadable(store / DATA, error) from error
    sync = not (store.name == MAKING and (store.parent / locks.WRITER).exists())
    disk, limit = os.statvfs(store), resource.getrlimit(resource.RLIMIT_AS)[0]
    size = min(MAP_SIZE, max(1 << 30, 2 * disk.f_blocks * disk.f_frsize))
    if limit != resource.RLIM_INFINITY:
        size = max(min(size, limit // 2), _LEAST_MAP)
    while True:
        try:
            return lmdb.open(
                str(store), map_size=size, max_dbs=len(DATABASES), max_readers=MAX_READERS, mode=0o600,
                sync=sync, metasync=sync, writemap=False, readahead=True, lib_version=0,
            )  # fmt: skip
        except lmdb.Error as error:
            tight = isinstance(error, lmdb.MemoryError) or os.strerror(errno.ENOMEM) in str(error)
            if tight and size > _LEAST_MAP:
                size //= 2
                continue
            with translated(store):
                raise


def make_store(store: Path, lock_timeout: float, fill: Fill) -> None:
    """Create data.mdb unless another process has created it meanwhile."""
    with locks.writer_lock(store, lock_timeout):
        if not os.path.lexists(store / DATA):
            with made_aside(store) as folder, translated(store):
                made = open_lmdb(folder)
                dbs = {name: made.open_db(name.encode()) for name in DATABASES}
                with made.begin(write=True) as transaction:
                    fill(transaction, dbs)
                made.close()


def compact_copy(store: Path, folder: Path) -> None:
    """Copy the store's data.mdb without its free pages into an empty directory. The store must not be open. LMDB trusts
    every page that it copies, so all pages are checked first. Raises StoreCorrupt."""
    with os.fdopen(open_file(store / DATA, anywhere=True), "rb", buffering=0) as file, translated(store):
        newest(file.fileno(), store).check()
        source = open_lmdb(store)
        try:
            source.copy(str(folder), compact=True)
        finally:
            source.close()


@contextmanager
def replacing(store: Path, lock_timeout: float, num_bytes: int) -> Iterator[Path]:
    """Yield an empty directory. The data.mdb created in it replaces the store's, which must not be open.

    Safe against a crash at any point, because the file is renamed into place. Raises StoreLocked if other processes
    keep the store open, StoreNoSpace. num_bytes: maximum size of the new file.
    """
    locked = locks.writer_lock(store, lock_timeout), locks.nobody_else(store, lock_timeout)
    with locked[0], locked[1], made_aside(store, num_bytes) as folder:
        yield folder


@contextmanager
def made_aside(store: Path, num_bytes: int = 0) -> Iterator[Path]:
    """Yield an empty directory whose data.mdb is renamed into the store at the end. Requires the writer lock."""
    folder = store / MAKING
    clear_making(store)
    check_space(store, num_bytes)
    with system_errors(store):
        folder.mkdir(mode=0o700)
    try:
        yield folder
        with system_errors(store):
            os.chmod(folder / DATA, 0o600)  # LMDB's copies follow the umask
            sync_handle(open_file(folder / DATA, anywhere=True))
            os.rename(folder / DATA, store / DATA)
            sync_folder(store)
    finally:
        clear_making(store)


def clear_making(store: Path) -> None:
    """Remove the unfinished file of a process that was killed. Call it with the writer lock held."""
    making = store / MAKING
    if making.is_symlink():
        making.unlink()
    shutil.rmtree(making, ignore_errors=True)
