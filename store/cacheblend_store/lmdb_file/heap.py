"""What a large write costs beside the disk: the memory that LMDB takes for its pages and gives back with each commit."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 256 << 20
_LARGEST_ON_HEAP = 32 << 20  # glibc's own limit


@cache
def keep_freed_memory() -> None:
    """Let the process keep up to 256 MiB that was freed, for the next transaction. Once is enough.

    glibc returns large blocks to the system as soon as they are freed, and the page faults of taking them anew cost a
    writer as much as its writes do. Other C libraries are left alone.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)
