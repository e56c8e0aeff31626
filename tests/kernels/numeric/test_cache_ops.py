"""RoPE and cache writes: right at the slots, and not a bit changed anywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache, Slots
from cacheblend_kernels.triton_backend.cache_ops import rope, rope_and_cache
from cases import TOLERANCE, held, moved, rope_tables
from kernel_references import rope_reference

NUM_BLOCKS, BLOCK_SIZE = 5, 8


def pools(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *scales: torch.Tensor
) -> LayerCache:
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return LayerCache(*(torch.full(shape, 7.0, device=device).to(dtype) for _ in range(2)), *scales)


def check_pool(pool: torch.Tensor, slots: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """want: fp64 [num_rows, heads, dim] at the slots, 7.0 elsewhere."""
    flat = held(pool)
    torch.testing.assert_close(flat[slots], want, atol=tolerance, rtol=tolerance)
    others = torch.ones(flat.shape[0], dtype=torch.bool)
    others[slots] = False
    assert (flat[others] == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((4, 2), 64, torch.float32),
        ((28, 4), 80, torch.bfloat16),
        ((3, 1), 96, torch.float16),
        ((18, 18), 16, torch.float32),
        ((2, 2), 256, torch.bfloat16),
    ],
)
def test_rope_and_cache(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    num_rows, (num_heads, num_kv_heads) = 6, heads
    fused = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rope_tables(num_rows, head_dim)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_rows]
    cache = pools(num_kv_heads, head_dim, dtype, device)
    fused = fused.to(device)
    rows = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    out = rope_and_cache(*rows, cache, moved(Slots(slots, cos, sin), device))
    assert out is not None
    assert out.is_contiguous()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), rope_reference(q, cos, sin), atol=tolerance, rtol=tolerance)
    check_pool(cache.k, slots, rope_reference(k, cos, sin), tolerance)
    check_pool(cache.v, slots, v.double(), 0.0)


def test_without_q(device: torch.device) -> None:
    k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    cos, sin = rope_tables(3, 32)
    slots = torch.tensor([39, 0, 8])
    cache = pools(2, 32, torch.bfloat16, device)
    assert rope_and_cache(None, k.to(device), v.to(device), cache, moved(Slots(slots, cos, sin), device)) is None
    check_pool(cache.k, slots, rope_reference(k, cos, sin), TOLERANCE[torch.bfloat16])
    check_pool(cache.v, slots, v.double(), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (17, 32), (4, 80)])
def test_rope(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 2 * num_heads, head_dim).to(dtype)[:, :num_heads]
    cos, sin = rope_tables(5, head_dim)
    out = rope(x.to(device), cos.to(device), sin.to(device))
    torch.testing.assert_close(
        out.cpu().double(), rope_reference(x, cos, sin), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_float8_pool(device: torch.device) -> None:
    k, v = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    v[0, 0, 0] = 1e6  # saturates, and is no NaN
    cos, sin = rope_tables(4, 32)
    slots = torch.tensor([3, 9, 1, 30])
    k_scale, v_scale = torch.tensor([0.02, 0.03]), torch.tensor([0.05, 0.01])
    cache = pools(2, 32, torch.float8_e4m3fn, device, k_scale.to(device), v_scale.to(device))
    rope_and_cache(None, k.to(device), v.to(device), cache, moved(Slots(slots, cos, sin), device))
    stored_k, stored_v = (held(*p)[slots].float() for p in ((cache.k, k_scale), (cache.v, v_scale)))
    torch.testing.assert_close(stored_k.double(), rope_reference(k, cos, sin), atol=2e-3, rtol=0.07)
    assert stored_v[0, 0, 0] == 448 * v_scale[0]
    v[0, 0, 0] = stored_v[0, 0, 0]
    torch.testing.assert_close(stored_v, v, atol=2e-3, rtol=0.07)


def test_float8_pool_rounds_as_torch_does(device: torch.device) -> None:
    """Every code, the midpoints between codes and both sides of them, the ends, in a pool whose scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, middle, middle.nextafter(codes[1:]), middle.nextafter(codes[:-1]), torch.rand(5) * 1e-6))
    values = torch.cat((values, -values))
    values = torch.cat((values, torch.zeros(-len(values) % 32))).view(-1, 1, 32)
    num_rows = values.shape[0]
    k_pool, v_pool = (torch.zeros(4, 8, 1, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale, rows = torch.ones(1, device=device), values.to(device)
    slots = Slots(torch.arange(num_rows), torch.ones(num_rows, 32), torch.zeros(num_rows, 32))
    rope_and_cache(None, rows, rows, LayerCache(k_pool, v_pool, scale, scale), moved(slots, device))
    for written in (k_pool, v_pool):
        got = written.cpu().view(-1, 1, 32)[:num_rows].float()
        assert torch.equal(got, values.to(torch.float8_e4m3fn).float())


def test_no_rows(device: torch.device) -> None:
    empty = torch.zeros(0, 2, 32, device=device)
    tables = torch.zeros(0, 32, device=device)
    slots = Slots(torch.zeros(0, dtype=torch.int64, device=device), tables, tables)
    cache = pools(2, 32, torch.float32, device)
    out = rope_and_cache(empty, empty, empty, cache, slots)
    assert out is not None
    assert out.shape == (0, 2, 32)
    assert (cache.k == 7.0).all()


def test_refusals(device: torch.device) -> None:
    x = torch.randn(3, 2, 32, device=device)
    cos = torch.zeros(3, 32, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    cache = pools(2, 32, torch.float32, device)
    good = Slots(slots, cos, cos)
    with pytest.raises(KernelError, match="float32"):
        rope(x, cos.double(), cos)
    with pytest.raises(KernelError, match="int64"):
        rope_and_cache(None, x, x, cache, replace(good, slots=slots.int()))
    with pytest.raises(KernelError, match="scales"):
        rope_and_cache(None, x, x, replace(cache, k_scale=cos[0], v_scale=cos[0]), good)
    with pytest.raises(KernelError, match="slots"):
        rope_and_cache(None, x[:, :1], x[:, :1], cache, good)


def test_a_passed_check_does_not_cover_other_signatures(device: torch.device) -> None:
    """Checks run for the first launch of a signature: another signature is checked again, and so is a refused one."""
    x, tables = torch.randn(3, 2, 32, device=device), torch.zeros(3, 32, device=device)
    good = Slots(torch.arange(3, device=device), tables, tables)
    cache = pools(2, 32, torch.float32, device)
    for _ in range(2):
        rope_and_cache(None, x, x, cache, good)
        with pytest.raises(KernelError, match="strides"):
            rope_and_cache(None, x.transpose(1, 2).contiguous().transpose(1, 2), x, cache, good)
        with pytest.raises(KernelError, match="int64"):
            rope_and_cache(None, x, x, cache, replace(good, slots=good.slots.int()))
        with pytest.raises(KernelError, match="not contiguous"):
            rope_and_cache(None, x, x, LayerCache(cache.k.transpose(0, 1), cache.v.transpose(0, 1)), good)
