"""Load stored K and V into the pool in one kernel: dequantise, rotate K to its new positions, cast, scatter.

`StoredKV` describes the stored formats.
"""

# Kernels are untyped: their arguments are Triton's.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import LayerCache, Slots, StoredKV
from cacheblend_kernels.triton_backend.cache_ops import rotate, to_pool
from cacheblend_kernels.triton_backend.checks import (
    FLOAT8,
    FLOATS,
    check,
    check_cache,
    check_device,
    check_head_scales,
    check_heads,
    check_rope,
    check_slots,
    device_guard,
    is_float8,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32, e5m2_to_fp32

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
    if CODEC == "fp8" or CODEC == "e5m2":
        code = tl.load(ptr + row * (NUM_KV_HEADS * HEAD_DIM) + at, mask=mask, other=0)
        scale = tl.load(scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=0.0)
        value = e4m3_to_fp32(code) if CODEC == "fp8" else e5m2_to_fp32(code)
        return value * scale[:, None]
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


def load_kv(stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
    """`KernelBackend.load_kv`."""
    run, num_rows = slots.first_slot >= 0, stored.k.shape[0]
    num_slots = cache.k.shape[0] * cache.k.shape[1]
    check(not run or slots.first_slot + num_rows <= num_slots, "the slots run past the pool")
    _check(stored, cache, slots.cos, slots.sin, None if run else slots.slots)
    if num_rows == 0:
        return
    codec, cos, fp8_pool = _codec(stored, cache), slots.cos, is_float8(cache)
    num_kv_heads, head_dim = cache.k.shape[2:]
    with device_guard(stored.k):
        load_kv_kernel[(num_rows, -(-num_kv_heads // BLOCK_HEADS))](
            pool_bits(stored.k),
            pool_bits(stored.v),
            cos,
            slots.sin,
            pool_bits(cache.k),
            pool_bits(cache.v),
            cos if run else slots.slots,
            cos if stored.k_scale is None else stored.k_scale,
            cos if stored.k_zero is None else stored.k_zero,
            cos if stored.v_scale is None else stored.v_scale,
            cos if stored.v_zero is None else stored.v_zero,
            cache.k_scale if fp8_pool else cos,
            cache.v_scale if fp8_pool else cos,
            slots.first_slot,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=BLOCK_HEADS,
            GROUP_SIZE=stored.group_size,
            CODEC=codec,
            RUN=run,
            FP8_POOL=fp8_pool,
            num_warps=4,
        )


def _codec(stored: StoredKV, cache: LayerCache) -> str:
    """The format of the tensors: plain, fp8 (e4m3), e5m2, int8 or int4 (see `StoredKV`)."""
    if stored.k.dtype == torch.uint8:
        return "int8" if stored.k.shape[2] == cache.k.shape[3] else "int4"
    return {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "e5m2"}.get(stored.k.dtype, "plain")


@once
def _check(stored: StoredKV, cache: LayerCache, cos: Tensor, sin: Tensor, slots: Tensor | None) -> None:
    """Check the inputs. slots: None if they are consecutive, and not read."""
    check_cache(cache)
    k, v, num_rows, (num_kv_heads, head_dim) = stored.k, stored.v, stored.k.shape[0], cache.k.shape[2:]
    check(k.shape == v.shape and k.dtype == v.dtype, f"k is {list(k.shape)} {k.dtype}, v is {list(v.shape)} {v.dtype}")
    check(k.is_contiguous() and v.is_contiguous(), "stored K and V are not contiguous")
    check_rope(cos, sin, num_rows, head_dim)
    if slots is not None:
        check_slots(slots, num_rows)
    check_device(*tensors_of(stored), *tensors_of(cache), cos, sin, slots)
    full = (num_rows, num_kv_heads, head_dim)
    if k.dtype == torch.uint8:
        check(k.shape in (full, (*full[:2], head_dim // 2)), f"k is {list(k.shape)}, the pool's rows {list(full)}")
        by_channel = (-(-num_rows // stored.group_size), num_kv_heads, head_dim)
        by_token = (num_rows, num_kv_heads, 1)
        for name, t, shape in (
            ("k_scale", stored.k_scale, by_channel),
            ("k_zero", stored.k_zero, by_channel),
            ("v_scale", stored.v_scale, by_token),
            ("v_zero", stored.v_zero, by_token),
        ):
            good = t is not None and t.shape == shape and t.dtype == torch.float32 and t.is_contiguous()
            check(good, f"an integer codec needs {name} {list(shape)} float32")
        return
    check_heads("k", k, (*FLOATS, *FLOAT8))
    check(k.shape == full, f"k is {list(k.shape)}, the pool's rows {list(full)}")
    check(stored.k_zero is None and stored.v_zero is None, "zero points are for the integer codecs")
    if k.dtype in FLOAT8:
        check_head_scales("float8", num_kv_heads, stored.k_scale, stored.v_scale)
    else:
        check(stored.k_scale is None and stored.v_scale is None, f"{k.dtype} takes no scales")
