"""Populated memory is there before it is touched, and holds what it held."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from cacheblend_cli.kv.host_memory import populate

SIZE = 32 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def can_populate() -> bool:
    if sys.platform != "linux":
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(torch.frombuffer(page, dtype=torch.uint8).data_ptr()), 1, 23) == 0


@pytest.mark.skipif(not can_populate(), reason="this system takes no pages ahead (Linux 5.14 or later does)")
def test_pages_are_there_before_they_are_touched() -> None:
    mapped = mmap.mmap(-1, SIZE)  # not from a heap, which may have pages left
    tensor = torch.frombuffer(mapped, dtype=torch.float32)
    before = resident()
    populate(tensor)
    assert resident() - before > SIZE // 2


@pytest.mark.parametrize("count", [0, 1, 5, 3 * mmap.PAGESIZE])
def test_nothing_else_changes(count: int) -> None:
    whole = torch.arange(count + 2)
    populate(whole[1:-1])
    assert torch.equal(whole, torch.arange(count + 2))
