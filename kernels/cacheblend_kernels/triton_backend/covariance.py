"""Prior covariance of the changes in a chunk: points from its old K and V, and the changes of its recomputed rows.

Part of the correction (`correction.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from cacheblend_kernels.triton_backend.attention_core import product
from cacheblend_kernels.triton_backend.cache_ops import rotate
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32


@triton.jit
def halves_of(pool_ptr, scale_ptr, slots, head, dims, mask, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return both halves of a head of slots [N], fp32 [N, BLOCK_HALF]."""
    at = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    x1 = tl.load(pool_ptr + at, mask=mask, other=0)
    x2 = tl.load(pool_ptr + at + HEAD_DIM // 2, mask=mask, other=0)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr + head)
        return e4m3_to_fp32(x1) * factor, e4m3_to_fp32(x2) * factor
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _unrotate(x1, x2, cos_ptr, sin_ptr, rows, dims, mask, HEAD_DIM: tl.constexpr):
    """Return both halves of K before RoPE. cos and sin may be scaled by RoPE's attention factor."""
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    square = cos * cos + sin * sin
    return rotate(x1, x2, cos / square, -sin / square)


@triton.jit
def chunk_spread_kernel(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    starts_ptr,
    mean_ptr,
    spread_ptr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One chunk, one head of K or V. Grid (num_chunks, 2 * num_kv_heads): mean [head_dim] of the head over the chunk's
    rows, and the mean squared distance from it. Sums are of distances from the first row, so that channels with a large
    offset lose no digits."""
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    head = part % NUM_KV_HEADS
    begin = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    if begin >= end:
        return
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HEAD_DIM // 2
    first = begin + tl.zeros([1], dtype=tl.int32)
    sum1 = tl.zeros([BLOCK_HALF], dtype=tl.float32)
    sum2 = tl.zeros([BLOCK_HALF], dtype=tl.float32)
    squares = tl.zeros([BLOCK_HALF], dtype=tl.float32)
    base1 = tl.zeros([1, BLOCK_HALF], dtype=tl.float32)
    base2 = tl.zeros([1, BLOCK_HALF], dtype=tl.float32)
    slot = tl.load(slots_ptr + first)
    if part < NUM_KV_HEADS:
        base1, base2 = halves_of(k_ptr, k_scale_ptr, slot, head, dims, in_half[None, :], NUM_KV_HEADS, HEAD_DIM)
        base1, base2 = _unrotate(base1, base2, cos_ptr, sin_ptr, first, dims, in_half[None, :], HEAD_DIM)
    else:
        base1, base2 = halves_of(v_ptr, v_scale_ptr, slot, head, dims, in_half[None, :], NUM_KV_HEADS, HEAD_DIM)
    for start in range(begin, end, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < end)[:, None] & in_half[None, :]
        slots = tl.load(slots_ptr + rows, mask=rows < end, other=0)
        if part < NUM_KV_HEADS:
            x1, x2 = halves_of(k_ptr, k_scale_ptr, slots, head, dims, mask, NUM_KV_HEADS, HEAD_DIM)
            x1, x2 = _unrotate(x1, x2, cos_ptr, sin_ptr, rows, dims, mask, HEAD_DIM)
        else:
            x1, x2 = halves_of(v_ptr, v_scale_ptr, slots, head, dims, mask, NUM_KV_HEADS, HEAD_DIM)
        x1 = tl.where(mask, x1 - base1, 0.0)
        x2 = tl.where(mask, x2 - base2, 0.0)
        sum1 += tl.sum(x1, 0)
        sum2 += tl.sum(x2, 0)
        squares += tl.sum(x1 * x1 + x2 * x2, 0)
    count = (end - begin).to(tl.float32)
    mean1 = sum1 / count
    mean2 = sum2 / count
    at = (chunk * 2 * NUM_KV_HEADS + part) * HEAD_DIM + dims
    tl.store(mean_ptr + at, mean1 + tl.sum(base1, 0), mask=in_half)
    tl.store(mean_ptr + at + HEAD_DIM // 2, mean2 + tl.sum(base2, 0), mask=in_half)
    spread = tl.sum(squares / count - mean1 * mean1 - mean2 * mean2, 0)
    tl.store(spread_ptr + chunk * 2 * NUM_KV_HEADS + part, tl.maximum(spread, 0.0))


@triton.jit
def _row(pool_ptr, scale_ptr, slot, heads, dims, mask, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return both halves of all heads of one slot, fp32 [BLOCK_HEADS, BLOCK_HALF]."""
    at = slot * (NUM_KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    x1 = tl.load(pool_ptr + at, mask=mask, other=0)
    x2 = tl.load(pool_ptr + at + HEAD_DIM // 2, mask=mask, other=0)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=0.0)[:, None]
        return e4m3_to_fp32(x1) * factor, e4m3_to_fp32(x2) * factor
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _unrotate_row(x1, x2, cos_ptr, sin_ptr, row, dims, HEAD_DIM: tl.constexpr):
    """Return both halves of all heads of one row's K before RoPE."""
    in_half = dims < HEAD_DIM // 2
    cos = tl.load(cos_ptr + row * HEAD_DIM + dims, mask=in_half, other=1.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + dims, mask=in_half, other=0.0)[None, :]
    square = cos * cos + sin * sin
    return rotate(x1, x2, cos / square, -sin / square)


@triton.jit
def standardise_kernel(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    starts_ptr,
    mean_ptr,
    spread_ptr,
    points_ptr,
    norms_ptr,
    sizes_ptr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One row of one chunk. Grid (num_chunks, longest): its point, K before RoPE and V as distances from the chunk's
    mean in units of their root mean square; half of its squared norm; and the norm of V itself."""
    chunk = tl.program_id(0)
    row = tl.load(starts_ptr + chunk).to(tl.int64) + tl.program_id(1)
    if row >= tl.load(starts_ptr + chunk + 1):
        return
    slot = tl.load(slots_ptr + row)
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    norm = 0.0
    for which in tl.static_range(2):
        part = chunk * 2 + which
        spread = tl.load(spread_ptr + part * NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=0.0)
        factor = 1.0 / tl.sqrt(tl.maximum(tl.sum(spread, 0), 1e-30))
        if which == 0:
            x1, x2 = _row(k_ptr, k_scale_ptr, slot, heads, dims, mask, NUM_KV_HEADS, HEAD_DIM)
            x1, x2 = _unrotate_row(x1, x2, cos_ptr, sin_ptr, row, dims, HEAD_DIM)
        else:
            x1, x2 = _row(v_ptr, v_scale_ptr, slot, heads, dims, mask, NUM_KV_HEADS, HEAD_DIM)
            size = tl.sum(tl.sum(x1 * x1 + x2 * x2, 1), 0)
            tl.store(sizes_ptr + row, tl.sqrt(size))
        at = heads[:, None] * HEAD_DIM + dims[None, :]
        means = mean_ptr + part * (NUM_KV_HEADS * HEAD_DIM) + at
        x1 = (x1 - tl.load(means, mask=mask, other=0.0)) * factor
        x2 = (x2 - tl.load(means + HEAD_DIM // 2, mask=mask, other=0.0)) * factor
        x1 = x1.to(points_ptr.dtype.element_ty)
        x2 = x2.to(points_ptr.dtype.element_ty)
        to = points_ptr + (row * 2 + which) * (NUM_KV_HEADS * HEAD_DIM) + at
        tl.store(to, x1, mask=mask)
        tl.store(to + HEAD_DIM // 2, x2, mask=mask)
        x1 = tl.where(mask, x1.to(tl.float32), 0.0)
        x2 = tl.where(mask, x2.to(tl.float32), 0.0)
        norm += tl.sum(tl.sum(x1 * x1 + x2 * x2, 1), 0)
    tl.store(norms_ptr + row, 0.5 * norm)


@triton.jit(do_not_specialize=["num_chunks"])
def change_kernel(
    fresh_k_ptr,
    fresh_v_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    known_ptr,
    known_starts_ptr,
    fresh_ptr,
    change_ptr,
    sizes_ptr,
    num_chunks,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One recomputed row. Grid (num_known,): fresh minus old K (before RoPE) and V, and its squared norm."""
    number = tl.program_id(0).to(tl.int64)
    if number >= tl.load(known_starts_ptr + num_chunks):
        return
    row = tl.load(known_ptr + number).to(tl.int64)
    fresh_row = tl.load(fresh_ptr + number)
    slot = tl.load(slots_ptr + row)
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    size = 0.0
    for which in tl.static_range(2):
        if which == 0:
            old1, old2 = _row(k_ptr, k_scale_ptr, slot, heads, dims, mask, NUM_KV_HEADS, HEAD_DIM)
            old1, old2 = _unrotate_row(old1, old2, cos_ptr, sin_ptr, row, dims, HEAD_DIM)
            fresh = fresh_k_ptr + fresh_row * k_stride + at
        else:
            old1, old2 = _row(v_ptr, v_scale_ptr, slot, heads, dims, mask, NUM_KV_HEADS, HEAD_DIM)
            fresh = fresh_v_ptr + fresh_row * v_stride + at
        x1 = tl.load(fresh, mask=mask, other=0.0).to(tl.float32) - old1
        x2 = tl.load(fresh + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32) - old2
        to = change_ptr + (number * 2 + which) * (NUM_KV_HEADS * HEAD_DIM) + at
        tl.store(to, x1, mask=mask)
        tl.store(to + HEAD_DIM // 2, x2, mask=mask)
        x1 = tl.where(mask, x1, 0.0)
        x2 = tl.where(mask, x2, 0.0)
        size += tl.sum(tl.sum(x1 * x1 + x2 * x2, 1), 0)
    tl.store(sizes_ptr + number, size)


@triton.jit
def common_kernel(
    change_ptr, known_starts_ptr, out_ptr, K_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr
):
    """A tile of channels of K. Grid (num_chunks, tiles of K_WIDTH): out [num_chunks, K_WIDTH] fp32, the mean change of
    the recomputed rows of a chunk and the chunks before it."""
    chunk = tl.program_id(0)
    last = tl.load(known_starts_ptr + chunk + 1)
    if tl.load(known_starts_ptr + chunk) == last:
        return
    channels = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    real = channels < K_WIDTH
    total = tl.zeros([BLOCK_W], dtype=tl.float32)
    for start in range(0, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        ptrs = change_ptr + rows.to(tl.int64)[:, None] * (2 * K_WIDTH) + channels[None, :]
        total += tl.sum(tl.load(ptrs, mask=(rows < last)[:, None] & real[None, :], other=0.0), 0)
    tl.store(out_ptr + chunk * K_WIDTH + channels, total / last, mask=real)


@triton.jit(do_not_specialize=["longest"])
def covariance_kernel(
    points_ptr,
    norms_ptr,
    starts_ptr,
    known_ptr,
    known_starts_ptr,
    out_ptr,
    longest,
    of_chunk,
    of_near,
    near_length,
    far_length,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of recomputed rows by rows of one chunk. Grid (num_chunks, tiles of the most recomputed, tiles of the
    longest): prior covariance of their changes, out [num_known, longest] fp32."""
    chunk = tl.program_id(0)
    begin = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    first = tl.load(known_starts_ptr + chunk) + tl.program_id(1) * BLOCK_M
    last = tl.load(known_starts_ptr + chunk + 1)
    start = begin + tl.program_id(2) * BLOCK_N
    if first >= last:
        return
    if start >= end:
        return
    numbers = first + tl.arange(0, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_N)
    own = numbers < last
    real = rows < end
    known = tl.load(known_ptr + numbers, mask=own, other=0)
    channels = tl.arange(0, BLOCK_K)
    a_ptrs = points_ptr + known.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    b_ptrs = points_ptr + rows.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    inner = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for at in range(0, WIDTH, BLOCK_K):
        here = (at + channels < WIDTH)[None, :]
        a = tl.load(a_ptrs + at, mask=own[:, None] & here, other=0.0)
        b = tl.load(b_ptrs + at, mask=real[:, None] & here, other=0.0)
        inner = product(a, tl.trans(b), inner)
    far = tl.load(norms_ptr + known, mask=own, other=0.0)[:, None]
    far += tl.load(norms_ptr + rows, mask=real, other=0.0)[None, :]
    apart = tl.abs(known[:, None] - rows[None, :]).to(tl.float32)
    near = tl.exp(-apart / near_length) + tl.exp(-apart / far_length)
    found = tl.exp(tl.minimum(inner - far, 0.0)) + of_chunk + of_near * near
    at = numbers.to(tl.int64)[:, None] * longest + (rows - begin)[None, :]
    tl.store(out_ptr + at, found, mask=own[:, None] & real[None, :])
