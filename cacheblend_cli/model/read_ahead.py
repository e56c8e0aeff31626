"""Read weights from disk while torch is imported. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cacheblend_cli import user_cache

KIND = "read"
# Bytes of a piece. Whether its last page is in memory tells whether the piece is: its first pages are read ahead with
# the piece before. Large, because after each piece the thread waits for Python's lock.
PIECE = 32 << 20
MOST = 1 / 2  # share of the machine's memory


def remember(model: str | None, dtype: str, weight_dtype: str, files: Iterable[Path]) -> None:
    """Record the files that a start with these settings reads."""
    place, text = _place(model, dtype, weight_dtype), "\n".join(os.path.realpath(file) for file in files)
    if user_cache.recall(place) != text:
        user_cache.keep(place, text)


def read_ahead(model: str | None, dtype: str, weight_dtype: str) -> threading.Thread | None:
    """Read the files of the last such start, in a thread that ends with the process. None if there is no record."""
    files = [name for name in user_cache.recall(_place(model, dtype, weight_dtype)).split("\n") if name]
    if not hasattr(os, "RWF_NOWAIT") or not files:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="cacheblend-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[str]) -> int:
    """Read pieces that are not in memory. Returns their number."""
    count, left = 0, int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MOST)
    page, piece = bytearray(1), bytearray(PIECE)
    for name in files:
        with suppress(OSError), open(name, "rb", buffering=0) as stream:
            end = min(os.fstat(stream.fileno()).st_size, left)
            left -= end
            for start in range(0, end, PIECE):
                try:
                    os.preadv(stream.fileno(), [page], min(start + PIECE, end) - 1, os.RWF_NOWAIT)
                except BlockingIOError:
                    os.preadv(stream.fileno(), [piece], start)
                    count += 1
    return count


def _place(model: str | None, *dtypes: str) -> Path:
    name = model or ""
    return user_cache.place(KIND, os.path.realpath(name) if os.path.exists(name) else name, *dtypes)
