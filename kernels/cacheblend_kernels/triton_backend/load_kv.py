"""Load stored K and V into the pool in one kernel: dequantise, rotate K to its new positions, cast, scatter.

`StoredKV` describes the stored formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import PLANES, LayerCache, Slots, StoredKV, packed_bytes
from cacheblend_kernels.triton_backend.cache_ops import rotate, to_pool
from cacheblend_kernels.triton_backend.checks import (
    FLOAT8,
    FLOATS,
    check,
    check_cache,
    check_device,
    check_heads,
    check_rope,
    check_scales,
    check_tensor,
    device_guard,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32

BLOCK_HEADS = 8


@triton.jit
def _plane(ptr, at, channels, mask, HEAD_DIM: tl.constexpr, PLANE: tl.constexpr):
    """Return the channels' codes, int32, in a plane of PLANE bits; `at`: the plane's first byte of each head."""
    NUM_BYTES: tl.constexpr = (HEAD_DIM * PLANE + 7) // 8
    found = tl.load(ptr + at[:, None] + (channels % NUM_BYTES)[None, :], mask=mask, other=0).to(tl.int32)
    return (found >> (channels // NUM_BYTES * PLANE)[None, :]) & ((1 << PLANE) - 1)


@triton.jit
def _blocks_mixed(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Hadamard transform, without its factor, of each BLOCK = 2^STAGES values in x. A stage adds and subtracts
    neighbours and moves the lowest bit of their index to the top, so that after all stages every value is where it
    was."""
    rows = tl.reshape(x, [ROWS, BLOCK])
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(rows, [ROWS, BLOCK // 2, 2]))
        rows = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, BLOCK])
    return tl.reshape(rows, x.shape)


@triton.jit
def _of_codes(
    ptr, scale_ptr, levels_ptr, row, heads, channels, mask,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return one half of the heads' channels: levels of their codes times the scale, mixed within their blocks."""
    own = heads < NUM_KV_HEADS
    LOW: tl.constexpr = BITS & 4
    LOW_BYTES: tl.constexpr = (HEAD_DIM * LOW + 7) // 8
    MID: tl.constexpr = BITS & 2
    MID_BYTES: tl.constexpr = (HEAD_DIM * MID + 7) // 8
    HIGH: tl.constexpr = BITS & 1
    HIGH_BYTES: tl.constexpr = (HEAD_DIM * HIGH + 7) // 8
    at = (row * NUM_KV_HEADS + heads) * (LOW_BYTES + MID_BYTES + HIGH_BYTES)
    code = tl.zeros([heads.shape[0], channels.shape[0]], dtype=tl.int32)
    if LOW > 0:
        code = _plane(ptr, at, channels, mask, HEAD_DIM, LOW)
    if MID > 0:
        code += _plane(ptr, at + LOW_BYTES, channels, mask, HEAD_DIM, MID) << LOW
    if HIGH > 0:
        code += _plane(ptr, at + LOW_BYTES + MID_BYTES, channels, mask, HEAD_DIM, HIGH) << (LOW + MID)
    scale = tl.load(scale_ptr + row * NUM_KV_HEADS + heads, mask=own, other=0.0).to(tl.float32)
    value = tl.load(levels_ptr + code, mask=mask, other=0.0) * scale[:, None]
    return _blocks_mixed(value, value.shape[0] * value.shape[1] // BLOCK, BLOCK, STAGES)


@triton.jit
def _halves(
    ptr, scale_ptr, levels_ptr, row, chunk, heads, halves, mask, factor, CODEC: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return both halves of the heads' channels of one stored row, fp32 [BLOCK_HEADS, BLOCK_HALF], without a mean."""
    high = halves + HEAD_DIM // 2
    if CODEC == "codes":
        a = _of_codes(ptr, scale_ptr, levels_ptr, row, heads, halves, mask, BITS, BLOCK, STAGES, NUM_KV_HEADS, HEAD_DIM)
        b = _of_codes(ptr, scale_ptr, levels_ptr, row, heads, high, mask, BITS, BLOCK, STAGES, NUM_KV_HEADS, HEAD_DIM)
        return (a + b) * factor, (a - b) * factor
    a = _decoded(ptr, scale_ptr, row, chunk, heads, halves, mask, CODEC, NUM_KV_HEADS, HEAD_DIM)
    return a, _decoded(ptr, scale_ptr, row, chunk, heads, high, mask, CODEC, NUM_KV_HEADS, HEAD_DIM)


@triton.jit
def _decoded(
    ptr, scale_ptr, row, chunk, heads, channels, mask,
    CODEC: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return the heads' channels of one row stored as plain values, fp32 [BLOCK_HEADS, BLOCK_HALF]."""
    at = row * (NUM_KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + channels[None, :]
    value = tl.load(ptr + at, mask=mask, other=0)
    if CODEC != "plain":
        value = e4m3_to_fp32(value)
        value *= tl.load(scale_ptr + chunk * NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=0.0)[:, None]
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["first_slot"])
def load_kv_kernel(
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    row_chunks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_mean_ptr,
    k_levels_ptr,
    v_levels_ptr,
    pool_k_scale_ptr,
    pool_v_scale_ptr,
    first_slot,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CODEC: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_HEADS heads of one row. Grid (num_rows, parts).

    slots_ptr None: the slots are first_slot, first_slot + 1, ... row_chunks_ptr None: all rows are of one chunk. Other
    pointers are None if the format of the stored values or of the pool does not need them. CODEC "codes" has K_BITS and
    V_BITS per value, mixed in blocks of BLOCK = 2^STAGES channels in each half of a head. factor: makes mixing its own
    inverse.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HEAD_DIM // 2
    mask = (heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
    slot = first_slot + row if slots_ptr is None else tl.load(slots_ptr + row)
    chunk = 0 if row_chunks_ptr is None else tl.load(row_chunks_ptr + row)
    at = slot * (NUM_KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + halves[None, :]
    cos = tl.load(cos_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    k_factor = 1.0
    v_factor = 1.0
    if pool_k_scale_ptr is not None:
        k_factor = 1.0 / tl.load(pool_k_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]
        v_factor = 1.0 / tl.load(pool_v_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]

    k1, k2 = _halves(
        k_ptr, k_scale_ptr, k_levels_ptr, row, chunk, heads, halves, mask, factor,
        CODEC, K_BITS, BLOCK, STAGES, NUM_KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    v1, v2 = _halves(
        v_ptr, v_scale_ptr, v_levels_ptr, row, chunk, heads, halves, mask, factor,
        CODEC, V_BITS, BLOCK, STAGES, NUM_KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    if CODEC == "codes":
        mean_at = k_mean_ptr + (chunk * NUM_KV_HEADS + heads[:, None]) * HEAD_DIM + halves[None, :]
        k1 += tl.load(mean_at, mask=mask, other=0.0).to(tl.float32)
        k2 += tl.load(mean_at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    k1, k2 = rotate(k1, k2, cos, sin)
    tl.store(k_cache_ptr + at, to_pool(k1 * k_factor, k_cache_ptr), mask=mask)
    tl.store(k_cache_ptr + at + HEAD_DIM // 2, to_pool(k2 * k_factor, k_cache_ptr), mask=mask)
    tl.store(v_cache_ptr + at, to_pool(v1 * v_factor, v_cache_ptr), mask=mask)
    tl.store(v_cache_ptr + at + HEAD_DIM // 2, to_pool(v2 * v_factor, v_cache_ptr), mask=mask)


def load_kv(stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
    """`KernelBackend.load_kv`."""
    run, num_rows = slots.first_slot >= 0, stored.k.shape[0]
    num_slots = cache.k.shape[0] * cache.k.shape[1]
    check(not run or slots.first_slot + num_rows <= num_slots, "the slots run past the pool")
    _check(stored, cache, slots.cos, slots.sin, None if run else slots.slots)
    if num_rows == 0:
        return
    codec = _codec(stored)
    num_kv_heads, head_dim = cache.k.shape[2:]
    block = mixed_block(head_dim) if codec == "codes" else 1
    with device_guard(stored.k):
        load_kv_kernel[(num_rows, -(-num_kv_heads // BLOCK_HEADS))](
            pool_bits(stored.k),
            pool_bits(stored.v),
            slots.cos,
            slots.sin,
            pool_bits(cache.k),
            pool_bits(cache.v),
            None if run else slots.slots,
            stored.row_chunks,
            stored.k_scale,
            stored.v_scale,
            stored.k_mean,
            stored.k_levels,
            stored.v_levels,
            cache.k_scale,
            cache.v_scale,
            slots.first_slot,
            (2 * block) ** -0.5,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=BLOCK_HEADS,
            CODEC=codec,
            K_BITS=stored.bits[0],
            V_BITS=stored.bits[1],
            BLOCK=block,
            STAGES=block.bit_length() - 1,
            num_warps=4,
        )


def _codec(stored: StoredKV) -> str:
    """Return the format of the tensors: plain, fp8 or codes (see `StoredKV`)."""
    return {torch.uint8: "codes", FLOAT8: "fp8"}.get(stored.k.dtype, "plain")


def mixed_block(head_dim: int) -> int:
    """Return the channels of half a head that are mixed together: the largest power of two dividing the half."""
    half = head_dim // 2
    return half & -half


@once
def _check(stored: StoredKV, cache: LayerCache, cos: Tensor, sin: Tensor, slots: Tensor | None) -> None:
    """Check the inputs. slots: None if they are consecutive and thus not read."""
    check_cache(cache)
    k, v, num_rows, (num_kv_heads, head_dim) = stored.k, stored.v, stored.k.shape[0], cache.k.shape[2:]
    alike = k.shape == v.shape or k.dtype == torch.uint8
    check(alike and k.dtype == v.dtype, f"k is {list(k.shape)} {k.dtype}, v is {list(v.shape)} {v.dtype}")
    check(k.is_contiguous() and v.is_contiguous(), "stored K and V are not contiguous")
    check_rope(cos, sin, num_rows, head_dim)
    if slots is not None:
        check_tensor("slots", slots, (num_rows,), torch.int64)
    check_device(*tensors_of(stored), *tensors_of(cache), cos, sin, slots)
    full, num_chunks = (num_rows, num_kv_heads, head_dim), 1
    if stored.row_chunks is not None:
        check_tensor("row_chunks", stored.row_chunks, (num_rows,), torch.int32)
        per_chunk = stored.k_scale if stored.k_mean is None else stored.k_mean
        num_chunks = 0 if per_chunk is None else per_chunk.shape[0]
    if k.dtype == torch.uint8:
        for name, part, bits in (("k", k, stored.bits[0]), ("v", v, stored.bits[1])):
            check(bits in PLANES, f"codes need {name}_levels, of {list(PLANES)} bits")
            check_tensor(f"{name} of {bits} bits", part, (*full[:2], packed_bytes(head_dim, bits)), torch.uint8)
        for name, t, wanted, dtype in (
            ("k_scale", stored.k_scale, full[:2], torch.bfloat16),
            ("v_scale", stored.v_scale, full[:2], torch.bfloat16),
            ("k_mean", stored.k_mean, (num_chunks, *full[1:]), torch.bfloat16),
            ("k_levels", stored.k_levels, (2 ** stored.bits[0],), torch.float32),
            ("v_levels", stored.v_levels, (2 ** stored.bits[1],), torch.float32),
        ):
            check_tensor(f"{name} of codes", t, wanted, dtype)
        return
    check_heads("k", k, (*FLOATS, FLOAT8))
    check(k.shape == full, f"k is {list(k.shape)}, the pool's rows {list(full)}")
    check(stored.k_mean is None and stored.bits == (0, 0), "a mean and levels are for codes")
    if k.dtype == FLOAT8:
        check_scales("float8", stored, (num_chunks, num_kv_heads))
    else:
        check(stored.k_scale is None and stored.v_scale is None, f"{k.dtype} takes no scales")
        check(stored.row_chunks is None, f"{k.dtype} takes no row_chunks: it has nothing per chunk")
