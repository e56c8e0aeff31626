"""swap_blocks and copy_blocks of every backend's base: the right blocks, all pools, and runs as one copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cacheblend_kernels import KernelError
from cacheblend_kernels.interface import _runs
from cacheblend_kernels.torch_backend import TorchBackend
from hypothesis import given
from hypothesis import strategies as st

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_runs_cover_every_pair_once_and_rise_together(pairs: list[tuple[int, int]]) -> None:
    src, dst = [a for a, _ in pairs], [b for _, b in pairs]
    runs = list(_runs(src, dst))
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(len(pairs)))
    for start, stop in runs:
        assert src[start:stop] == list(range(src[start], src[start] + stop - start))
        assert dst[start:stop] == list(range(dst[start], dst[start] + stop - start))
    for (_, stop), _ in pairwise(runs):
        assert (src[stop], dst[stop]) != (src[stop - 1] + 1, dst[stop - 1] + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_swap_blocks(place: str, dtype: torch.dtype) -> None:
    """Out to the host and in again, as a sequence that has to wait leaves the device."""
    device = torch.device(place)
    stream = torch.cuda.Stream(device) if place == "cuda" else None
    gpu = [torch.randn(9, 4, 2, 16).to(dtype).to(device) for _ in range(4)]
    host = [torch.zeros(6, 4, 2, 16).to(dtype) for _ in range(4)]
    if stream is not None:
        host = [h.pin_memory() for h in host]
    before = [g.cpu().float() for g in gpu]
    backend, src, dst = TorchBackend(), [2, 3, 4, 8, 0], [1, 2, 3, 0, 5]
    backend.swap_blocks(list(zip(gpu, host, strict=True)), src, dst, stream)
    if stream is not None:
        stream.synchronize()
    for g, h in zip(before, host, strict=True):
        assert torch.equal(h[dst].float(), g[src])
        assert (h[4].float() == 0).all()
    back = [torch.zeros_like(g) for g in gpu]
    backend.swap_blocks(list(zip(host, back, strict=True)), dst, [7, 1, 0, 5, 6], stream)
    if stream is not None:
        stream.synchronize()
    for g, b in zip(before, back, strict=True):
        assert torch.equal(b.cpu()[[7, 1, 0, 5, 6]].float(), g[src])


def test_swap_blocks_wants_as_many_places_as_blocks() -> None:
    pool = torch.zeros(3, 2)
    with pytest.raises(KernelError, match="2 blocks to copy, 1 to copy to"):
        TorchBackend().swap_blocks([(pool, pool.clone())], [0, 1], [2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copy_blocks(dtype: torch.dtype) -> None:
    pools = [torch.randn(6, 2, 3).to(dtype) for _ in range(2)]
    before = [p.float() for p in pools]
    TorchBackend().copy_blocks(pools, torch.tensor([4, 0]), torch.tensor([1, 5]))
    for old, new in zip(before, pools, strict=True):
        old[[1, 5]] = old[[4, 0]]
        assert torch.equal(new.float(), old)
