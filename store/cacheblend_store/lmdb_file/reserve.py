"""A file that keeps disk space for deletions: on a full disk, LMDB cannot delete without new pages."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from cacheblend_store.lmdb_file.directory import MIN_FREE_BYTES, RESERVE
from cacheblend_store.private_files import open_file

RESERVE_BYTES = 2 << 20


def keep_reserve(store: Path) -> None:
    """Create the file if it is missing and the disk has room. Without it, a full disk needs space from elsewhere."""
    path = store / RESERVE
    with suppress(OSError):
        if not os.path.lexists(path) and shutil.disk_usage(store).free > MIN_FREE_BYTES + RESERVE_BYTES:
            handle = open_file(path, os.O_RDWR | os.O_CREAT, anywhere=True)
            try:
                os.posix_fallocate(handle, 0, RESERVE_BYTES)
            finally:
                os.close(handle)


def use_reserve(store: Path) -> bool:
    """Give the space back to the disk. Return whether there was any."""
    with suppress(OSError):
        os.unlink(store / RESERVE)
        return True
    return False
