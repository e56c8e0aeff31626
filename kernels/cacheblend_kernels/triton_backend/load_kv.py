"""Stored K and V into the pool in one kernel: dequantise, rotate K to its new positions, cast, scatter.

Layouts of the stored form, for one chunk of num_rows tokens:

| codec        | k, v                                           | scales, fp32                                         |
|--------------|------------------------------------------------|------------------------------------------------------|
| plain        | [num_rows, num_kv_heads, head_dim] float       | none                                                 |
| float8 e4m3  | the same, float8_e4m3fn                        | k_scale, v_scale [num_kv_heads]                      |
| int8         | the same, uint8                                | k_scale, k_zero [groups, num_kv_heads, head_dim]: per |
|              |                                                | channel, group_size tokens each;                     |
|              |                                                | v_scale, v_zero [num_rows, num_kv_heads, 1]          |
| int4         | [num_rows, num_kv_heads, head_dim / 2] uint8,  | as int8                                              |
|              | even channels in the low nibbles               |                                                      |

The integer codecs are KIVI's (arXiv 2402.02750): value = code * scale + zero.
"""

# Kernels are untyped: their arguments are Triton's.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.triton_backend.cache_ops import rotate, to_pool
from cacheblend_kernels.triton_backend.checks import (
    FLOATS,
    check,
    check_device,
    check_head_scales,
    check_heads,
    check_pool,
    check_pool_scales,
    check_rope,
    check_slots,
    device_guard,
    pool_bits,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32

BLOCK_HEADS = 8


@triton.jit
def _decoded(
    ptr, scale_ptr, zero_ptr, row, heads, channels, mask, BY_CHANNEL: tl.constexpr, CODEC: tl.constexpr,
    GROUP_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The heads' channels of one stored row, fp32 [BLOCK_HEADS, BLOCK_HALF]."""
    at = heads[:, None] * HEAD_DIM + channels[None, :]
    if CODEC == "plain":
        return tl.load(ptr + row * (NUM_KV_HEADS * HEAD_DIM) + at, mask=mask, other=0.0).to(tl.float32)
    if CODEC == "fp8":
        code = tl.load(ptr + row * (NUM_KV_HEADS * HEAD_DIM) + at, mask=mask, other=0)
        scale = tl.load(scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=0.0)
        return e4m3_to_fp32(code) * scale[:, None]
    if CODEC == "int4":
        packed = heads[:, None] * (HEAD_DIM // 2) + (channels // 2)[None, :]
        pair = tl.load(ptr + row * (NUM_KV_HEADS * HEAD_DIM // 2) + packed, mask=mask, other=0).to(tl.int32)
        code = (pair >> ((channels % 2) * 4)[None, :]) & 15
    else:
        code = tl.load(ptr + row * (NUM_KV_HEADS * HEAD_DIM) + at, mask=mask, other=0).to(tl.int32)
    if BY_CHANNEL:
        cell = row // GROUP_SIZE * (NUM_KV_HEADS * HEAD_DIM) + at
        scale = tl.load(scale_ptr + cell, mask=mask, other=0.0)
        zero = tl.load(zero_ptr + cell, mask=mask, other=0.0)
        return code.to(tl.float32) * scale + zero
    scale = tl.load(scale_ptr + row * NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=0.0)
    zero = tl.load(zero_ptr + row * NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=0.0)
    return code.to(tl.float32) * scale[:, None] + zero[:, None]


@triton.jit(do_not_specialize=["first_slot"])
def load_kv_kernel(
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    k_zero_ptr,
    v_scale_ptr,
    v_zero_ptr,
    pool_k_scale_ptr,
    pool_v_scale_ptr,
    first_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODEC: tl.constexpr,
    RUN: tl.constexpr,
    FP8_POOL: tl.constexpr,
):
    """BLOCK_HEADS heads of one row. Grid (num_rows, parts). RUN: the slots are first_slot, first_slot + 1, ..."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HEAD_DIM // 2
    mask = (heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
    slot = first_slot + row if RUN else tl.load(slots_ptr + row)
    at = slot * (NUM_KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + halves[None, :]
    cos = tl.load(cos_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    k_factor = 1.0
    v_factor = 1.0
    if FP8_POOL:
        k_factor = 1.0 / tl.load(pool_k_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]
        v_factor = 1.0 / tl.load(pool_v_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]

    high = halves + HEAD_DIM // 2
    k1 = _decoded(
        k_ptr, k_scale_ptr, k_zero_ptr, row, heads, halves, mask, True, CODEC, GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM
    )
    k2 = _decoded(
        k_ptr, k_scale_ptr, k_zero_ptr, row, heads, high, mask, True, CODEC, GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM
    )
    v1 = _decoded(
        v_ptr, v_scale_ptr, v_zero_ptr, row, heads, halves, mask, False, CODEC, GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM
    )
    v2 = _decoded(
        v_ptr, v_scale_ptr, v_zero_ptr, row, heads, high, mask, False, CODEC, GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM
    )
    k1, k2 = rotate(k1, k2, cos, sin)
    tl.store(k_cache_ptr + at, to_pool(k1 * k_factor, k_cache_ptr, FP8_POOL), mask=mask)
    tl.store(k_cache_ptr + at + HEAD_DIM // 2, to_pool(k2 * k_factor, k_cache_ptr, FP8_POOL), mask=mask)
    tl.store(v_cache_ptr + at, to_pool(v1 * v_factor, v_cache_ptr, FP8_POOL), mask=mask)
    tl.store(v_cache_ptr + at + HEAD_DIM // 2, to_pool(v2 * v_factor, v_cache_ptr, FP8_POOL), mask=mask)


def load_kv(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    group_size: int = 32,
    first_slot: int = -1,
    pool_k_scale: Tensor | None = None,
    pool_v_scale: Tensor | None = None,
) -> None:
    """Write one chunk's stored, unrotated K and V into the pool. The module's table says which layouts are taken.

    cos, sin: [num_rows, head_dim] fp32 at the new positions; slot_mapping: [num_rows] int64, not read when
    first_slot >= 0; pool_k_scale, pool_v_scale: [num_kv_heads] fp32 of a float8 pool.
    """
    check_pool("k_cache", k_cache)
    check_pool("v_cache", v_cache)
    check(k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype, "the K and V pools differ")
    num_rows, (num_kv_heads, head_dim) = k.shape[0], k_cache.shape[2:]
    codec = _codec(k, v, num_kv_heads, head_dim, k_scale, v_scale, k_zero, v_zero, group_size)
    check_rope(cos, sin, num_rows, head_dim)
    if first_slot < 0:
        check_slots(slot_mapping, num_rows)
    else:
        check(first_slot + num_rows <= k_cache.shape[0] * k_cache.shape[1], "the slots run past the pool")
    fp8_pool = check_pool_scales(k_cache, pool_k_scale, pool_v_scale, "pool_")
    read_slots = slot_mapping if first_slot < 0 else None
    scales = (k_scale, v_scale, k_zero, v_zero, pool_k_scale, pool_v_scale)
    check_device(k, v, cos, sin, k_cache, v_cache, read_slots, *scales)
    if num_rows == 0:
        return
    if codec == "fp8":
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    with device_guard(k):
        load_kv_kernel[(num_rows, -(-num_kv_heads // BLOCK_HEADS))](
            k,
            v,
            cos,
            sin,
            pool_bits(k_cache),
            pool_bits(v_cache),
            cos if read_slots is None else read_slots,
            cos if k_scale is None else k_scale,
            cos if k_zero is None else k_zero,
            cos if v_scale is None else v_scale,
            cos if v_zero is None else v_zero,
            pool_k_scale if fp8_pool else cos,
            pool_v_scale if fp8_pool else cos,
            first_slot,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=BLOCK_HEADS,
            GROUP_SIZE=group_size,
            CODEC=codec,
            RUN=first_slot >= 0,
            FP8_POOL=fp8_pool,
            num_warps=4,
        )


def _codec(
    k: Tensor,
    v: Tensor,
    num_kv_heads: int,
    head_dim: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_zero: Tensor | None,
    v_zero: Tensor | None,
    group_size: int,
) -> str:
    """Which row of the module's table the tensors are: plain, fp8, int8 or int4."""
    check(k.shape == v.shape and k.dtype == v.dtype, f"k is {list(k.shape)} {k.dtype}, v is {list(v.shape)} {v.dtype}")
    check(k.is_contiguous() and v.is_contiguous(), "stored K and V are not contiguous")
    num_rows, full = k.shape[0], (k.shape[0], num_kv_heads, head_dim)
    if k.dtype == torch.uint8:
        check(k.shape in (full, (*full[:2], head_dim // 2)), f"k is {list(k.shape)}, the pool's rows {list(full)}")
        by_channel = (-(-num_rows // group_size), num_kv_heads, head_dim)
        by_token = (num_rows, num_kv_heads, 1)
        for name, t, shape in (
            ("k_scale", k_scale, by_channel),
            ("k_zero", k_zero, by_channel),
            ("v_scale", v_scale, by_token),
            ("v_zero", v_zero, by_token),
        ):
            good = t is not None and t.shape == shape and t.dtype == torch.float32 and t.is_contiguous()
            check(good, f"an integer codec needs {name} {list(shape)} float32")
        return "int8" if k.shape == full else "int4"
    check_heads("k", k, (*FLOATS, torch.float8_e4m3fn))
    check(k.shape == full, f"k is {list(k.shape)}, the pool's rows {list(full)}")
    check(k_zero is None and v_zero is None, "zero points are for the integer codecs")
    if k.dtype != torch.float8_e4m3fn:
        check(k_scale is None and v_scale is None, f"{k.dtype} takes no scales")
        return "plain"
    check_head_scales("float8", num_kv_heads, {"k_scale": k_scale, "v_scale": v_scale})
    return "fp8"
