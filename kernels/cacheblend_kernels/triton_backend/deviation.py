"""KV deviation: squared distance of fresh K and V from the pool. CacheBlend (arXiv 2405.16444), section 4.3."""

# Kernels are untyped: their arguments are Triton's.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import LayerCache
from cacheblend_kernels.triton_backend.checks import (
    check,
    check_cache,
    check_device,
    check_rows_of,
    check_slots,
    device_guard,
    is_float8,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32

KINDS = ("k", "v", "kv")


@triton.jit
def _held(ptrs, scale_ptrs, mask, FP8: tl.constexpr):
    """Load the pool's contents as fp32."""
    if FP8:
        return e4m3_to_fp32(tl.load(ptrs, mask=mask, other=0)) * tl.load(scale_ptrs, mask=mask, other=0.0)
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def kv_deviation_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    k_stride,
    v_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_K: tl.constexpr,
    USE_V: tl.constexpr,
    FP8: tl.constexpr,
):
    """One row: sum of squared differences over its WIDTH = num_kv_heads * head_dim elements, K and V in one pass."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(slots_ptr + row) * WIDTH
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        at = start + offsets
        mask = at < WIDTH
        if USE_K:
            old = _held(k_cache_ptr + base + at, k_scale_ptr + at // HEAD_DIM, mask, FP8)
            change = tl.load(k_ptr + row * k_stride + at, mask=mask, other=0.0).to(tl.float32) - old
            total += change * change
        if USE_V:
            old = _held(v_cache_ptr + base + at, v_scale_ptr + at // HEAD_DIM, mask, FP8)
            change = tl.load(v_ptr + row * v_stride + at, mask=mask, other=0.0).to(tl.float32) - old
            total += change * change
    tl.store(out_ptr + row, tl.sum(total, 0))


def kv_deviation(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str = "kv") -> Tensor:
    """`KernelBackend.kv_deviation`. Rows may be strided; the differences and their sum are fp32."""
    _check(k, v, cache, slots, kind)
    out = torch.empty(k.shape[0], dtype=torch.float32, device=k.device)
    if k.shape[0] == 0:
        return out
    width, fp8 = k.shape[1] * k.shape[2], is_float8(cache)
    with device_guard(k):
        kv_deviation_kernel[(k.shape[0],)](
            k,
            v,
            pool_bits(cache.k),
            pool_bits(cache.v),
            slots,
            cache.k_scale if fp8 else out,
            cache.v_scale if fp8 else out,
            out,
            k.stride(0),
            v.stride(0),
            HEAD_DIM=k.shape[2],
            WIDTH=width,
            BLOCK=min(1024, padded(width)),
            USE_K="k" in kind,
            USE_V="v" in kind,
            FP8=fp8,
            num_warps=4,
        )
    return out


@once
def _check(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str) -> None:
    check(kind in KINDS, f"unknown deviation {kind!r}", f"known: {', '.join(KINDS)}")
    check_cache(cache)
    check_rows_of(cache, k, v)
    check_slots(slots, k.shape[0])
    check_device(k, v, *tensors_of(cache), slots)
