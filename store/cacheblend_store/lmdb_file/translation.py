"""Translate errors of LMDB and the operating system to StoreErrors."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from cacheblend_store.errors import StoreCorrupt, StoreError, StoreFull, StoreIOError, StoreNoSpace, StorePermission

MAX_READERS = 2048
_LEAST_FREE = 1 << 20  # bytes; a disk with less is full
_FULL_DISK = ("No space left", "Disk quota exceeded", os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.BadTxnError, lmdb.CursorFullError)


class Reopen(StoreIOError):
    """A commit failed. LMDB works again after it is reopened."""


@contextmanager
def translated(store: Path) -> Iterator[None]:
    """Translate LMDB's errors."""
    try:
        yield
    except lmdb.PanicError as error:
        raise Reopen(f"an earlier write to the store at {store} failed", "check the disk, then try again") from error
    except (lmdb.MapFullError, lmdb.MapResizedError) as error:
        raise StoreFull(
            f"the store at {store} has outgrown the address space of this process",
            "raise its limit (ulimit -v), or remove chunks: cacheblend chunks prune",
        ) from error
    except lmdb.ReadersFullError as error:
        raise StoreIOError(f"the store at {store} already has {MAX_READERS} readers", "end some of them") from error
    except _DAMAGE as error:
        raise damaged(store, str(error)) from error
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise StoreError(f"this process has opened {store} without ChunkStore", "close it") from error
        # LMDB calls a short write, as on a full disk, an I/O error
        if any(text in str(error) for text in _FULL_DISK) or (os.strerror(errno.EIO) in str(error) and _is_full(store)):
            raise full_disk(store) from error
        raise bad_disk(store, error) from error


def _is_full(store: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(store).free < _LEAST_FREE
    return False


@contextmanager
def system_errors(store: Path) -> Iterator[None]:
    """Translate errors of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(store) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorePermission(f"cannot write {store}: {error.strerror}", "use a store of your own") from error
        raise bad_disk(store, error) from error


def damaged(store: Path, what: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"the store at {store} is damaged: {what}",
        f"rescue what reads: cacheblend chunks verify --repair; or {again_hint(store)}",
    )


def full_disk(store: Path) -> StoreNoSpace:
    return StoreNoSpace(
        f"the disk of {store} is full: nothing of this write was kept",
        "free some space, remove chunks (cacheblend chunks prune), or name another --store",
    )


def bad_disk(store: Path, error: Exception) -> StoreIOError:
    hint = "check its path and filesystem, or name another --store"
    if os.strerror(errno.EIO) in str(error):
        hint = "check the disk (dmesg names bad sectors)"
    return StoreIOError(f"reading or writing the store at {store} failed: {error}", hint)


def again_hint(store: Path) -> str:
    return f"compute the KV again: move {store} away and run cacheblend precompute"
