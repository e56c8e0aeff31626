"""Large tensors on the host: what they are made of is nobody's business but the system's."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from cacheblend_cli.engine.host_memory import LARGE_PAGE, empty_host

SHAPE = (3, LARGE_PAGE)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    first, second = empty_host(SHAPE, dtype), empty_host(SHAPE, dtype)
    assert first.shape == SHAPE
    assert first.dtype == dtype
    assert first.is_contiguous()
    assert first.data_ptr() % LARGE_PAGE == 0
    first.view(torch.uint8).fill_(1)
    second.view(torch.uint8).fill_(2)
    assert bool((first.view(torch.uint8) == 1).all())


def test_small_ones_and_systems_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert empty_host((2, 3), torch.float32).shape == (2, 3)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty_host(SHAPE, torch.float32).shape == SHAPE


@linux
def test_memory_goes_back_with_the_last_view() -> None:
    empty_host(SHAPE, torch.float32)
    gc.collect()
    before = address_space()
    part = empty_host((64, LARGE_PAGE), torch.float32)[3:5]
    assert address_space() - before >= 64 * LARGE_PAGE
    del part
    gc.collect()
    assert address_space() - before < 64 * LARGE_PAGE
