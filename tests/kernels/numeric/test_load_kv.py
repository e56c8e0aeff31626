"""Stored K and V into the pool: every codec's layout, dequantised in fp64 by the test itself."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels import KernelError
from cacheblend_kernels.triton_backend.load_kv import load_kv
from cases import TOLERANCE, rope_tables
from kernel_references import CODECS, decoded, rope_reference, stored_kv

GROUP = 4  # tokens that share a K scale; small, so that a few rows span groups
BLOCK_SIZE = 8
CPU = torch.device("cpu")


def stored(codec: str, *shape: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """(the kernel's tensors, K and V they stand for in fp64) of shape (num_rows, num_kv_heads, head_dim)."""
    tensors = stored_kv(codec, *shape, CPU, group_size=GROUP)
    return tensors, *decoded(tensors, shape[2], GROUP)


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("heads", "dim", "pool_dtype"), [(2, 64, torch.float32), (9, 80, torch.bfloat16)])
def test_load_kv(codec: str, heads: int, dim: int, pool_dtype: torch.dtype, run: bool, device: torch.device) -> None:
    num_rows = 11
    tensors, k_value, v_value = stored(codec, num_rows, heads, dim)
    cos, sin = rope_tables(num_rows, dim)
    slots = torch.arange(13, 13 + num_rows) if run else torch.randperm(48)[:num_rows]
    caches = [torch.full((6, BLOCK_SIZE, heads, dim), 7.0, device=device).to(pool_dtype) for _ in range(2)]
    moved = {name: t.to(device) for name, t in tensors.items()}
    load_kv(
        moved.pop("k"), moved.pop("v"), cos.to(device), sin.to(device), *caches, slots.to(device),
        first_slot=13 if run else -1, group_size=GROUP, **moved,
    )  # fmt: skip
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    for cache, want in zip(caches, (rope_reference(k_value, cos, sin), v_value), strict=True):
        flat = cache.cpu().double().view(-1, heads, dim)
        tolerance = TOLERANCE[pool_dtype]
        torch.testing.assert_close(flat[slots], want, atol=tolerance, rtol=tolerance)
        assert (flat[others] == 7.0).all()


def test_plain_values_of_one_dtype_are_copied_exactly(device: torch.device) -> None:
    v = torch.randn(5, 2, 32).to(torch.bfloat16)
    cos, sin = torch.ones(5, 32), torch.zeros(5, 32)
    caches = [torch.zeros(2, BLOCK_SIZE, 2, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    load_kv(v.to(device), v.to(device), cos.to(device), sin.to(device), *caches, torch.arange(5), first_slot=2)
    for cache in caches:
        assert torch.equal(cache.cpu().view(-1, 2, 32)[2:7], v)


@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_float8_pool(codec: str, device: torch.device) -> None:
    tensors, k_value, v_value = stored(codec, 5, 2, 32)
    cos, sin = rope_tables(5, 32)
    scales = torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.01])
    caches = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    moved = {name: t.to(device) for name, t in tensors.items()}
    load_kv(
        moved.pop("k"), moved.pop("v"), cos.to(device), sin.to(device), *caches, torch.arange(5), first_slot=0,
        group_size=GROUP, pool_k_scale=scales[0].to(device), pool_v_scale=scales[1].to(device), **moved,
    )  # fmt: skip
    for cache, scale, want in zip(caches, scales, (rope_reference(k_value, cos, sin), v_value), strict=True):
        got = cache.cpu().float().view(-1, 2, 32)[:5] * scale[:, None]
        torch.testing.assert_close(got.double(), want, atol=2e-3, rtol=0.07)


def test_refusals(device: torch.device) -> None:
    tensors, _, _ = stored("int8", 5, 2, 32)
    moved = {name: t.to(device) for name, t in tensors.items()}
    k, v = moved.pop("k"), moved.pop("v")
    tables = [t.to(device) for t in rope_tables(5, 32)]
    caches = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device) for _ in range(2)]
    slots = torch.arange(5, device=device)
    with pytest.raises(KernelError, match="needs k_zero"):
        load_kv(k, v, *tables, *caches, slots, **{**moved, "k_zero": None}, group_size=GROUP)
    with pytest.raises(KernelError, match="needs k_scale"):
        load_kv(k, v, *tables, *caches, slots, **moved, group_size=2)
    with pytest.raises(KernelError, match="takes no scales"):
        load_kv(k.float(), v.float(), *tables, *caches, slots, k_scale=moved["k_scale"])
    with pytest.raises(KernelError, match="past the pool"):
        load_kv(k.float(), v.float(), *tables, *caches, slots, first_slot=12)
    float8 = [c.to(torch.float8_e4m3fn) for c in caches]
    with pytest.raises(KernelError, match="needs pool_v_scale"):
        load_kv(k.float(), v.float(), *tables, *float8, slots, pool_k_scale=torch.ones(2, device=device))
    with pytest.raises(KernelError, match="several devices"):
        load_kv(k.float(), v.float(), *tables, *caches, slots.to("meta"))
