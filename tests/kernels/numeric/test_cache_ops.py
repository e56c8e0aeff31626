"""RoPE and cache writes, block copies: right at the slots, and not a bit changed anywhere else."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels import KernelError
from cacheblend_kernels.triton_backend.backend import TritonBackend
from cacheblend_kernels.triton_backend.cache_ops import rope, rope_and_cache
from cases import TOLERANCE, rope_tables
from kernel_references import rope_reference

NUM_BLOCKS, BLOCK_SIZE = 5, 8


def pool(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), 7.0, device=device).to(dtype)


def check_pool(cache: torch.Tensor, slots: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """want: fp64 [num_rows, heads, dim] at the slots, 7.0 elsewhere."""
    flat = cache.cpu().float().double().view(-1, *cache.shape[2:])
    torch.testing.assert_close(flat[slots], want, atol=tolerance, rtol=tolerance)
    others = torch.ones(flat.shape[0], dtype=torch.bool)
    others[slots] = False
    assert (flat[others] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 64), ((28, 4), 80), ((3, 1), 96), ((18, 18), 16), ((2, 2), 256)]
)
def test_rope_and_cache(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    num_rows, (num_heads, num_kv_heads) = 6, heads
    fused = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rope_tables(num_rows, head_dim)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_rows]
    k_cache, v_cache = (pool(num_kv_heads, head_dim, dtype, device) for _ in range(2))
    fused = fused.to(device)
    moved = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    out = rope_and_cache(*moved, cos.to(device), sin.to(device), k_cache, v_cache, slots.to(device))
    assert out is not None
    assert out.is_contiguous()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), rope_reference(q, cos, sin), atol=tolerance, rtol=tolerance)
    check_pool(k_cache, slots, rope_reference(k, cos, sin), tolerance)
    check_pool(v_cache, slots, v.double(), 0.0)


def test_without_q(device: torch.device) -> None:
    k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    cos, sin = rope_tables(3, 32)
    slots = torch.tensor([39, 0, 8])
    caches = [pool(2, 32, torch.bfloat16, device) for _ in range(2)]
    args = [t.to(device) for t in (k, v, cos, sin)]
    assert rope_and_cache(None, *args, *caches, slots.to(device)) is None
    check_pool(caches[0], slots, rope_reference(k, cos, sin), TOLERANCE[torch.bfloat16])
    check_pool(caches[1], slots, v.double(), TOLERANCE[torch.bfloat16])


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
    caches = [pool(2, 32, torch.float8_e4m3fn, device) for _ in range(2)]
    args = [t.to(device) for t in (k, v, cos, sin)]
    rope_and_cache(None, *args, *caches, slots.to(device), k_scale=k_scale.to(device), v_scale=v_scale.to(device))
    stored_k, stored_v = (
        c.cpu().float().view(-1, 2, 32)[slots] * s[:, None] for c, s in zip(caches, (k_scale, v_scale), strict=True)
    )
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
    cache = [torch.zeros(4, 8, 1, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    one, zero = torch.ones(num_rows, 32, device=device), torch.zeros(num_rows, 32, device=device)
    slots, scale = torch.arange(num_rows, device=device), torch.ones(1, device=device)
    moved = values.to(device)
    rope_and_cache(None, moved, moved, one, zero, *cache, slots, k_scale=scale, v_scale=scale)
    for written in cache:
        got = written.cpu().view(-1, 1, 32)[:num_rows].float()
        assert torch.equal(got, values.to(torch.float8_e4m3fn).float())


def test_no_rows(device: torch.device) -> None:
    empty = torch.zeros(0, 2, 32, device=device)
    tables = torch.zeros(0, 32, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    caches = [pool(2, 32, torch.float32, device) for _ in range(2)]
    out = rope_and_cache(empty, empty, empty, tables, tables, *caches, slots)
    assert out is not None
    assert out.shape == (0, 2, 32)
    assert (caches[0] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copy_blocks(dtype: torch.dtype, device: torch.device) -> None:
    backend = TritonBackend(device)
    pools = [torch.randn(6, 8, 2, 48).to(dtype).to(device) for _ in range(3)]
    before = [p.cpu().float() for p in pools]
    backend.copy_blocks(pools, torch.tensor([4, 0], device=device), torch.tensor([1, 5], device=device))
    for old, new in zip(before, pools, strict=True):
        old[[1, 5]] = old[[4, 0]]
        assert torch.equal(new.cpu().float(), old)
    backend.copy_blocks(pools, *(torch.zeros(0, dtype=torch.int64, device=device),) * 2)
    backend.copy_blocks([], *(torch.zeros(0, dtype=torch.int64, device=device),) * 2)


def test_refusals(device: torch.device) -> None:
    x = torch.randn(3, 2, 32, device=device)
    cos = torch.zeros(3, 32, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    caches = [pool(2, 32, torch.float32, device) for _ in range(2)]
    with pytest.raises(KernelError, match="float32, contiguous"):
        rope(x, cos.double(), cos)
    with pytest.raises(KernelError, match="slot_mapping"):
        rope_and_cache(None, x, x, cos, cos, *caches, slots.int())
    with pytest.raises(KernelError, match="scales are for"):
        rope_and_cache(None, x, x, cos, cos, *caches, slots, k_scale=cos[0], v_scale=cos[0])
    with pytest.raises(KernelError, match="slots of"):
        rope_and_cache(None, x[:, :1], x[:, :1], cos, cos, *caches, slots)
