"""What a forked child must do before it can open a store that its parent has open.

py-lmdb opens a file once a process, and counts the parent's environments as the child's: they have to be closed in the
child. Closing ends their transactions, and a read transaction ends by freeing its slot in the reader table, which is
shared memory: the parent's slot, while the parent reads on. So the child first gets a copy of the table for its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_MAP_FIXED = 0x10


def detach_lock_table(path: Path) -> None:
    """Replace this process's mappings of the store's lock.mdb with private copies. Does nothing outside of Linux."""
    for start, end in list(_mappings(str(path.resolve() / "lock.mdb"))):
        content = ctypes.string_at(start, end - start)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        if libc.mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != start:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ctypes.memmove(start, content, len(content))


def _mappings(file: str) -> Iterator[tuple[int, int]]:
    """Address ranges of the shared mappings of a file."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "s" in fields[1] and fields[5].removesuffix(" (deleted)") == file:
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16)
