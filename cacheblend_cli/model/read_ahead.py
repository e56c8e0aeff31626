"""Weights are read from disk while torch is imported. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cacheblend_cli import user_cache

KIND = "read"
# Bytes; one page of a piece tells whether it is in memory. Large: after each piece the thread waits for Python's lock.
PIECE = 32 << 20
MOST = 1 / 2  # of the machine's memory


def remember(model: str, dtypes: tuple[str, str], files: Iterable[Path]) -> None:
    """Keep which files a start with this model, dtype and weight dtype reads."""
    place, text = _place(model, dtypes), "\n".join(os.path.realpath(file) for file in files)
    if user_cache.recall(place) != text:
        user_cache.keep(place, text)


def read_ahead(model: str, dtypes: tuple[str, str]) -> threading.Thread | None:
    """Begin to read what the last such start read, in a thread that ends with the process. None where nothing is known."""
    files = user_cache.recall(_place(model, dtypes)).split("\n")
    if not hasattr(os, "RWF_NOWAIT") or not files[0]:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="cacheblend-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[str]) -> int:
    """Read what is not in memory. Returns the number of pieces that were not."""
    count, left = 0, int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MOST)
    page, piece = bytearray(1), bytearray(PIECE)
    for name in files:
        with suppress(OSError), open(name, "rb", buffering=0) as stream:
            end = min(os.fstat(stream.fileno()).st_size, left)
            left -= end
            for start in range(0, end, PIECE):
                try:
                    os.preadv(stream.fileno(), [page], start, os.RWF_NOWAIT)
                except BlockingIOError:
                    os.preadv(stream.fileno(), [piece], start)
                    count += 1
    return count


def _place(model: str, dtypes: tuple[str, str]) -> Path:
    return user_cache.place(KIND, os.path.realpath(model) if os.path.exists(model) else model, dtypes)
