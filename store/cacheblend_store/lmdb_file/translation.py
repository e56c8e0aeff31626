"""LMDB's errors as the store's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from cacheblend_store.errors import StoreCorrupt, StoreError, StoreFull, StoreIOError
from cacheblend_store.lmdb_file.filesystem import bad_disk, full_disk

MAX_READERS = 2048
_FULL_DISK = ("No space left", "Disk quota exceeded", os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class MapFull(StoreFull):
    """The map is full, which `grow` mends."""


class Panic(StoreIOError):
    """LMDB refuses the environment after a failed commit, which `reopen` mends."""


class MapOutgrown(Exception):
    """Another process grew the file beyond this process's map."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """LMDB's errors as ours."""
    try:
        yield
    except StoreError:
        raise
    except lmdb.MapResizedError as error:
        raise MapOutgrown from error
    except lmdb.MapFullError as error:
        raise MapFull(
            f"the store at {path} has no room in its map", "remove chunks: cacheblend chunks prune"
        ) from error
    except lmdb.ReadersFullError as error:
        raise StoreIOError(f"the store at {path} has {MAX_READERS} readers already", "end some of them") from error
    except (
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.InvalidError,
        lmdb.BadTxnError,
        lmdb.CursorFullError,
    ) as error:
        raise StoreCorrupt(
            f"the store at {path} is damaged: {error}", "run: cacheblend chunks verify --repair"
        ) from error
    except lmdb.PanicError as error:
        raise Panic(f"an earlier write to the store at {path} failed", "check the disk, then try again") from error
    except lmdb.Error as error:
        if any(text in str(error) for text in _FULL_DISK):
            raise full_disk(path) from error
        raise bad_disk(path, error) from error
