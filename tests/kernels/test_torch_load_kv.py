"""Stored K and V into the pool by the torch backend, on CPU: every form, whole and short groups, runs and scattered slots."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels import LayerCache, Slots
from cacheblend_kernels.torch_backend import TorchBackend
from cases import rope_tables
from kernel_references import CODECS, decoded, rope_reference, stored_kv

GROUP = 4


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize(("num_rows", "heads", "dim"), [(1, 2, 64), (3, 1, 16), (9, 2, 64), (5, 3, 80), (1030, 2, 64)])
@pytest.mark.parametrize("run", [False, True])
def test_load_kv(form: str, num_rows: int, heads: int, dim: int, run: bool) -> None:
    torch.manual_seed(0)
    stored = stored_kv(form, num_rows, heads, dim, torch.device("cpu"), group_size=GROUP, nan=True)
    k_value, v_value = decoded(stored, dim)
    cos, sin = rope_tables(num_rows, dim)
    num_slots = -(-num_rows // 8) * 8 + 16
    slots = torch.arange(11, 11 + num_rows) if run else torch.randperm(num_slots)[:num_rows]
    pools = [torch.full((num_slots // 8, 8, heads, dim), 7.0) for _ in range(2)]
    TorchBackend().load_kv(stored, LayerCache(*pools), Slots(slots, cos, sin, 11 if run else -1))
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    for pool, wanted in zip(pools, (rope_reference(k_value, cos, sin), v_value), strict=True):
        flat = pool.view(num_slots, heads, dim).double()
        torch.testing.assert_close(flat[slots], wanted, atol=1e-4, rtol=1e-5, equal_nan=True)
        assert (flat[untouched] == 7.0).all()
