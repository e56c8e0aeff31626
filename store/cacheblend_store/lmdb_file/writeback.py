"""What a large commit waits for: the disk, which by itself begins to write when all has been handed over."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h
_PAUSE = 0.0005  # seconds, in which a commit hands over about a megabyte


@contextmanager
def early_writeback(handle: int) -> Iterator[None]:
    """Have the disk write what the file open at `handle` is given while more is given to it, where Linux runs.

    Only when the disk is busy changes, not what is on it after a sync: a commit still waits for that, and an error of
    these writes is reported there.
    """
    begin = _sync_file_range()
    if begin is None:
        yield
        return
    done = threading.Event()

    def work() -> None:
        while not done.wait(_PAUSE):
            begin(handle, 0, 0, _SYNC_FILE_RANGE_WRITE)  # 0 bytes from 0 on: the whole file

    thread = threading.Thread(target=work, name="early-writeback", daemon=True)
    with suppress(RuntimeError):  # the system gives no more threads: the disk begins later
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


@cache
def _sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function
