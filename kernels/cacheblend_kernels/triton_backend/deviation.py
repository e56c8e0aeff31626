"""KV deviation: how far fresh K and V are from what the pool holds. CacheBlend (arXiv 2405.16444), section 4.3."""

# Kernels are untyped: their arguments are Triton's.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.triton_backend.checks import (
    check,
    check_device,
    check_heads,
    check_pool,
    check_slots,
    device_guard,
)
from cacheblend_kernels.triton_backend.configs import padded

KINDS = ("k", "v", "kv")


@triton.jit
def kv_deviation_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    out_ptr,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_K: tl.constexpr,
    USE_V: tl.constexpr,
):
    """One row: sum of squared differences over its WIDTH = num_kv_heads * head_dim numbers, K and V in one pass."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(slots_ptr + row) * WIDTH
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        at = start + offsets
        mask = at < WIDTH
        if USE_K:
            old = tl.load(k_cache_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
            change = tl.load(k_ptr + row * k_stride + at, mask=mask, other=0.0).to(tl.float32) - old
            total += change * change
        if USE_V:
            old = tl.load(v_cache_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
            change = tl.load(v_ptr + row * v_stride + at, mask=mask, other=0.0).to(tl.float32) - old
            total += change * change
    tl.store(out_ptr + row, tl.sum(total, 0))


def kv_deviation(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, kind: str = "kv"
) -> Tensor:
    """Squared L2 distance [num_rows] fp32 of fresh k (rotated) and v [num_rows, num_kv_heads, head_dim] from their slots.

    kind: k, v, or kv (the sum). Rows may be strided; the differences and their sum are fp32.
    """
    check(kind in KINDS, f"unknown deviation {kind!r}", f"known: {', '.join(KINDS)}")
    check_heads("k", k)
    check_heads("v", v)
    check_pool("k_cache", k_cache)
    check_pool("v_cache", v_cache)
    check(k.shape == v.shape, f"k is {list(k.shape)}, v is {list(v.shape)}")
    check(k_cache.shape == v_cache.shape, "the K and V pools differ")
    check(k_cache.shape[2:] == k.shape[1:], f"rows of {list(k.shape[1:])}, slots of {list(k_cache.shape[2:])}")
    check(
        k_cache.dtype != torch.float8_e4m3fn and v_cache.dtype != torch.float8_e4m3fn,
        "deviation from a float8 pool is not measured",
        "blend into a bfloat16 pool",
    )
    check_slots(slot_mapping, k.shape[0])
    check_device(k, v, k_cache, v_cache, slot_mapping)
    out = torch.empty(k.shape[0], dtype=torch.float32, device=k.device)
    if k.shape[0] == 0:
        return out
    width = k.shape[1] * k.shape[2]
    with device_guard(k):
        kv_deviation_kernel[(k.shape[0],)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            out,
            k.stride(0),
            v.stride(0),
            WIDTH=width,
            BLOCK=min(1024, padded(width)),
            USE_K="k" in kind,
            USE_V="v" in kind,
            num_warps=4,
        )
    return out
