"""Memory of the host that a prompt's KV is about to fill."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

_MADV_POPULATE_WRITE = 23  # of linux/mman.h, since 5.14


def populate(tensor: Tensor) -> None:
    """Take the pages of a CPU tensor from the system in one call, where it can do that (Linux).

    Memory that a process has not touched yet comes 4 KiB at a time, a page fault each, and the faults take longer than
    what is then written there. This is for tensors that are about to be filled; their content does not change.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:  # what the system says to it does not matter: a page it did not give comes when it is touched
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
