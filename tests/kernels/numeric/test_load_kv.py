"""Stored K and V into the pool: every codec's layout, dequantised in fp64 by the test itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache, Slots, StoredKV
from cacheblend_kernels.triton_backend.load_kv import load_kv
from cases import TOLERANCE, held, moved, rope_tables
from kernel_references import CODECS, decoded, rope_reference, stored_kv

BLOCK_SIZE = 8
CPU = torch.device("cpu")


def stored(codec: str, *shape: int, num_chunks: int = 1) -> tuple[StoredKV, torch.Tensor, torch.Tensor]:
    """(what is stored, K and V it stands for in fp64) of shape (num_rows, num_kv_heads, head_dim)."""
    made = stored_kv(codec, *shape, CPU, num_chunks=num_chunks)
    return made, *decoded(made, shape[2])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("heads", "dim", "pool_dtype", "run"),
    [
        (2, 64, torch.float32, True),
        (9, 80, torch.bfloat16, False),
        pytest.param(2, 64, torch.float32, False, marks=pytest.mark.torture),
        pytest.param(9, 80, torch.bfloat16, True, marks=pytest.mark.torture),
    ],
)
def test_load_kv(codec: str, heads: int, dim: int, pool_dtype: torch.dtype, run: bool, device: torch.device) -> None:
    num_rows = 6
    given, k_value, v_value = stored(codec, num_rows, heads, dim, num_chunks=1 if run else 4)
    cos, sin = rope_tables(num_rows, dim)
    slots = torch.arange(13, 13 + num_rows) if run else torch.randperm(48)[:num_rows]
    pools = [torch.full((6, BLOCK_SIZE, heads, dim), 7.0, device=device).to(pool_dtype) for _ in range(2)]
    where = Slots(slots, cos, sin, 13 if run else -1)
    load_kv(moved(given, device), LayerCache(*pools), moved(where, device))
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    for pool, want in zip(pools, (rope_reference(k_value, cos, sin), v_value), strict=True):
        flat = held(pool)
        tolerance = TOLERANCE[pool_dtype]
        torch.testing.assert_close(flat[slots], want, atol=tolerance, rtol=tolerance)
        assert (flat[others] == 7.0).all()


def test_plain_values_of_one_dtype_are_copied_exactly(device: torch.device) -> None:
    v = torch.randn(5, 2, 32).to(torch.bfloat16)
    cos, sin = torch.ones(5, 32), torch.zeros(5, 32)
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    where = moved(Slots(torch.arange(5), cos, sin, first_slot=2), device)
    load_kv(moved(StoredKV(v, v), device), LayerCache(*pools), where)
    for pool in pools:
        assert torch.equal(pool.cpu().view(-1, 2, 32)[2:7], v)


@pytest.mark.parametrize("codec", ["bf16", "int7"])
def test_float8_pool(codec: str, device: torch.device) -> None:
    given, k_value, v_value = stored(codec, 5, 2, 32)
    cos, sin = rope_tables(5, 32)
    scales = torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.01])
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    where = moved(Slots(torch.arange(5), cos, sin, first_slot=0), device)
    load_kv(moved(given, device), moved(LayerCache(*pools, *scales), device), where)
    for pool, scale, want in zip(pools, scales, (rope_reference(k_value, cos, sin), v_value), strict=True):
        torch.testing.assert_close(held(pool, scale)[:5], want, atol=2e-3, rtol=0.07)


def test_refusals(device: torch.device) -> None:
    codes = moved(stored("int7", 5, 2, 32)[0], device)
    plain = moved(stored("fp32", 5, 2, 32)[0], device)
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device) for _ in range(2)]
    cache, slots = LayerCache(*pools), moved(Slots(torch.arange(5), *rope_tables(5, 32)), device)
    with pytest.raises(KernelError, match="k_mean"):
        load_kv(replace(codes, k_mean=None), cache, slots)
    with pytest.raises(KernelError, match="v_levels"):
        load_kv(replace(codes, v_levels=None), cache, slots)
    with pytest.raises(KernelError, match="3 bits"):
        load_kv(replace(codes, k_levels=codes.k_levels[:8]), cache, slots)
    with pytest.raises(KernelError, match="k_scale"):
        load_kv(replace(codes, k_scale=codes.k_scale.float()), cache, slots)
    with pytest.raises(KernelError, match="float32"):
        load_kv(replace(plain, k_scale=codes.k_scale), cache, slots)
    chunks = torch.zeros(5, dtype=torch.int32, device=device)
    with pytest.raises(KernelError, match="row_chunks"):
        load_kv(replace(plain, row_chunks=chunks), cache, slots)
    with pytest.raises(KernelError, match="row_chunks"):
        load_kv(replace(codes, row_chunks=chunks.long()), cache, slots)
    assert codes.k_mean is not None
    with pytest.raises(KernelError, match="k_mean"):
        load_kv(replace(codes, k_mean=codes.k_mean.repeat(2, 1, 1)), cache, slots)
    with pytest.raises(KernelError, match="slots"):
        load_kv(plain, cache, replace(slots, first_slot=12))
    float8 = [pool.to(torch.float8_e4m3fn) for pool in pools]
    with pytest.raises(KernelError, match="v_scale"):
        load_kv(plain, LayerCache(*float8, k_scale=torch.ones(2, device=device)), slots)
    with pytest.raises(KernelError, match="device"):
        load_kv(plain, cache, replace(slots, slots=slots.slots.to("meta")))
