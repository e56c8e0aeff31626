"""Stored K and V into the pool by the torch backend, on CPU: every form, whole and short groups, tables of either kind."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels.torch_backend import BLOCK_VALUES, TorchBackend
from kernel_references import CODECS, decoded, stored_kv

GROUP = 4


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), [(1, 2, 64), (3, 1, 16), (9, 2, 64), (5, 3, 80), (BLOCK_VALUES // 128 + 6, 2, 64)]
)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("run", [False, True])
def test_load_kv(form: str, num_rows: int, heads: int, dim: int, wide: bool, run: bool) -> None:
    torch.manual_seed(0)
    backend = TorchBackend()
    tensors = stored_kv(form, num_rows, heads, dim, torch.device("cpu"), group_size=GROUP, nan=True)
    k_value, v_value = decoded(tensors, dim, GROUP)
    angle = torch.randn(num_rows, dim // 2)
    cos, sin = (torch.cat((t, t), 1) for t in (angle.cos(), angle.sin()))
    tables = backend.rope_tables(cos, sin, heads) if wide else (cos, sin)
    num_slots = -(-num_rows // 8) * 8 + 16
    slots = torch.arange(11, 11 + num_rows) if run else torch.randperm(num_slots)[:num_rows]
    caches = [torch.full((num_slots // 8, 8, heads, dim), 7.0) for _ in range(2)]
    k, v = tensors.pop("k"), tensors.pop("v")
    backend.load_kv(k, v, *tables, *caches, slots, first_slot=11 if run else -1, group_size=GROUP, **tensors)
    low, high = k_value.chunk(2, -1)
    c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    for cache, wanted in zip(caches, (rotated, v_value), strict=True):
        flat = cache.view(num_slots, heads, dim).double()
        torch.testing.assert_close(flat[slots], wanted, atol=1e-4, rtol=1e-5, equal_nan=True)
        assert (flat[untouched] == 7.0).all()
