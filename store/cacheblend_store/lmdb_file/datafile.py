"""data.mdb as LMDB opens it, and how a new one takes its place: made aside, whole, then renamed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import lmdb

from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.filesystem import DATA, DATABASES, sync_file, system_errors
from cacheblend_store.lmdb_file.translation import MAX_READERS, translated
from cacheblend_store.state import write_identity

MAP_SIZE = 4 << 40  # sparse: address space, not disk
MAKING = "making.tmp"
_FIRST_MAP, _LEAST_MAP = 1 << 30, 64 << 20


def open_lmdb(path: Path, map_size: int, *, readonly: bool = False) -> Any:
    """lmdb.open with the settings the store's promises rest on: sync on, no writemap, LMDB 0.9's format."""
    data = path / DATA
    size = max(map_size, data.stat().st_size if data.exists() else 0)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        size = max(min(size, limit // 2), _LEAST_MAP)
    while True:
        try:
            return lmdb.open(
                str(path), map_size=size, max_dbs=len(DATABASES), max_readers=MAX_READERS, readonly=readonly,
                create=not readonly, mode=0o600, sync=True, metasync=True, writemap=False, readahead=True,
                lock=not readonly or os.access(path / "lock.mdb", os.W_OK), lib_version=0,
            )  # fmt: skip
        except lmdb.Error as error:
            tight = isinstance(error, lmdb.MemoryError) or os.strerror(errno.ENOMEM) in str(error)
            if tight and size > _LEAST_MAP:
                size //= 2
                continue
            with translated(path):
                raise


def make_store(path: Path, lock_timeout: float) -> None:
    """An empty store: made aside and renamed into place, so that a crash never leaves half a one."""
    with locks.writer_lock(path, lock_timeout):
        if (path / DATA).exists():
            return
        folder = fresh_folder(path / MAKING)
        try:
            with translated(path):
                made = open_lmdb(folder, _FIRST_MAP)
                dbs = {name: made.open_db(name.encode()) for name in DATABASES}
                with made.begin(write=True) as transaction:
                    write_identity(transaction, dbs)
                made.close()
            put_in_place(folder, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, path: Path) -> None:
    """Rename a finished data.mdb into the store's directory, where it replaces the old one in one step."""
    with system_errors(path):
        os.chmod(folder / DATA, 0o600)  # LMDB's copies go by the umask
        sync_file(folder / DATA)
        os.rename(folder / DATA, path / DATA)
        sync_file(path)
    shutil.rmtree(folder, ignore_errors=True)


def clear_making(path: Path) -> None:
    """Remove what somebody who was killed left half made. For the holder of the writer lock."""
    shutil.rmtree(path / MAKING, ignore_errors=True)


def fresh_folder(path: Path) -> Path:
    """An empty directory in a store."""
    shutil.rmtree(path, ignore_errors=True)
    with system_errors(path.parent):
        path.mkdir(mode=0o700)
    return path
