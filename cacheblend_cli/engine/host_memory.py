"""Memory of the host for large tensors, in large pages where the system has them."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20  # of x86-64, and of aarch64 with 4 KiB pages; elsewhere it is an alignment that does no harm


def empty_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU. What it does not use of its memory costs none.

    A prompt's KV goes into memory that the process has not touched yet, and taking that from the system 4 KiB at a time
    costs several times as much as filling it. So large tensors ask for large pages (madvise(2), MADV_HUGEPAGE); a
    system that has none, or is told not to give any, gives the small ones.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)
