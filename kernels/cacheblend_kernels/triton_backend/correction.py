"""Correction of stale KV by Gaussian process regression, one chunk at a time (`blend/corrections.py: Regression`).

A chunk's old K (before RoPE) and V become points, its recomputed rows are observations of the change, and the mean of
the posterior (Rasmussen and Williams, Gaussian Processes for Machine Learning, section 2.2) is added to the other rows.
Eight launches a layer, whatever the number of chunks. How many rows of a chunk were recomputed stays on the device:
grids cover the largest possible number, and programs beyond the real one return at once. Sums do not depend on grids.

RoPE is linear, so the change of a rotated key is the rotated change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import LayerCache, Regressed, RegressionPrior
from cacheblend_kernels.triton_backend.cache_ops import rotate, to_pool
from cacheblend_kernels.triton_backend.checks import (
    check,
    check_cache,
    check_device,
    check_heads,
    check_rope,
    check_tensor,
    device_guard,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.covariance import (
    change_kernel,
    chunk_spread_kernel,
    common_kernel,
    covariance_kernel,
    halves_of,
    standardise_kernel,
)

BLOCK = 64  # rows of a tile
COMMON_ROWS, COMMON_CHANNELS = 128, 32  # of a tile of `common_kernel`
PIVOT_ROWS, PIVOT_WARPS = 32, 8  # of `inverse_kernel`: rows that each warp sweeps in its registers, and warps


@triton.jit
def _swept(a, GROUPS: tl.constexpr, COPIES: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return minus the inverse of a symmetric definite tile by sweeping every row (Beaton 1964), which needs no pivots
    there.

    a: [GROUPS, 8, COPIES, BLOCK_P] fp32, rows in the first two dimensions, the same tile COPIES times, once per warp.
    Rows then lie in registers, columns in lanes, and a step has no reduction: the pivot's column is its row.
    """
    group = tl.arange(0, GROUPS)
    in_group = tl.arange(0, 8)
    columns = tl.arange(0, BLOCK_P)
    for first in range(GROUPS):
        for second in tl.static_range(8):
            here = (group == first)[:, None] & (in_group == second)[None, :]
            column_here = (columns == first * 8 + second)[None, :]
            row = tl.sum(tl.sum(tl.where(here[:, :, None, None], a, 0.0), 0), 0)
            side = tl.reshape(tl.trans(row), [GROUPS, 8, COPIES])
            pivot = tl.gather(row, tl.zeros([COPIES, BLOCK_P], dtype=tl.int32) + (first * 8 + second), 1)
            side = tl.where(here[:, :, None], -1.0, side)
            row = tl.where(column_here, -1.0, row) / pivot
            rest = tl.where(here[:, :, None, None] | column_here[None, None, :, :], 0.0, a)
            a = rest - side[:, :, :, None] * row[None, None, :, :]
    return a


@triton.jit
def _tile(inverse_ptr, stride, i, j, count, BLOCK_M: tl.constexpr):
    """Return pointers and mask of tile (i, j) of a chunk's matrix."""
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < count)[:, None] & (columns < count)[None, :]
    return inverse_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask


@triton.jit
def _matrix_product(a, b, acc):
    """Return a @ b + acc of fp32 tiles, on tensor cores with three TF32 products: nearly fp32."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _beside(rows, start, count, BLOCK_P: tl.constexpr):
    """Return which rows exist and are not among the BLOCK_P from start."""
    return (rows < count) & ((rows < start) | (rows >= start + BLOCK_P))


@triton.jit
def _sweep_pivots(inverse_ptr, stride, start, count, BLOCK_P: tl.constexpr, COPIES: tl.constexpr):
    """Sweep the diagonal tile of the BLOCK_P rows from start. It is symmetric: stored transposed, its addresses take
    fewer registers."""
    GROUPS: tl.constexpr = BLOCK_P // 8
    copies = tl.arange(0, COPIES)[:, None]
    rows = start + (tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :])[:, :, None, None]
    columns = (start + tl.arange(0, BLOCK_P)[None, :] + 0 * copies)[None, None, :, :]
    mask = (rows < count) & (columns < count)
    a = tl.load(inverse_ptr + (rows * stride + columns), mask=mask, other=0.0)
    a = tl.where((rows == columns) & (rows >= count), -1.0, a)  # rows of no token
    a = _swept(a, GROUPS, COPIES, BLOCK_P)
    tl.debug_barrier()
    tl.store(inverse_ptr + (columns * stride + rows), a, mask=mask & (copies == 0)[None, None, :, :])


@triton.jit
def _change_pivots(inverse_ptr, stride, start, count, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """Multiply the other columns of the BLOCK_P rows from start by the inverse of their diagonal tile."""
    pivots = start + tl.arange(0, BLOCK_P)
    own = pivots < count
    swept_ptrs = inverse_ptr + (pivots[:, None] * stride + pivots[None, :])
    inverse = -tl.load(swept_ptrs, mask=own[:, None] & own[None, :], other=0.0)
    for at in range(0, count, BLOCK_M):
        columns = at + tl.arange(0, BLOCK_M)
        mask = own[:, None] & _beside(columns, start, count, BLOCK_P)[None, :]
        ptrs = inverse_ptr + (pivots[:, None] * stride + columns[None, :])
        a = tl.load(ptrs, mask=mask, other=0.0)
        a = _matrix_product(inverse, a, tl.zeros([BLOCK_P, BLOCK_M], dtype=tl.float32))
        tl.debug_barrier()
        tl.store(ptrs, a, mask=mask)


@triton.jit
def _change_others(inverse_ptr, stride, start, count, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """Subtract from the other rows their columns of the BLOCK_P pivots times the pivots' changed rows."""
    index = tl.arange(0, BLOCK_P)
    pivots = start + index
    own = pivots < count
    for above in range(0, count, BLOCK_P):
        if above != start:
            rows = above + index
            real = (rows < count)[:, None]
            side = -tl.load(
                inverse_ptr + (rows[:, None] * stride + pivots[None, :]), mask=real & own[None, :], other=0.0
            )
            for left in range(0, count, BLOCK_M):
                columns = left + tl.arange(0, BLOCK_M)
                beside = _beside(columns, start, count, BLOCK_P)[None, :]
                top_ptrs = inverse_ptr + (pivots[:, None] * stride + columns[None, :])
                top = tl.load(top_ptrs, mask=own[:, None] & beside, other=0.0)
                ptrs = inverse_ptr + (rows[:, None] * stride + columns[None, :])
                a = _matrix_product(side, top, tl.load(ptrs, mask=real & beside, other=0.0))
                tl.debug_barrier()
                tl.store(ptrs, a, mask=real & beside)


@triton.jit
def _mirror_pivots(inverse_ptr, stride, start, count, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """Copy the BLOCK_P rows from start to their columns."""
    pivots = start + tl.arange(0, BLOCK_P)
    for at in range(0, count, BLOCK_M):
        columns = at + tl.arange(0, BLOCK_M)
        mask = (pivots < count)[:, None] & _beside(columns, start, count, BLOCK_P)[None, :]
        a = tl.load(inverse_ptr + (pivots[:, None] * stride + columns[None, :]), mask=mask, other=0.0)
        tl.store(inverse_ptr + (columns[None, :] * stride + pivots[:, None]), a, mask=mask)


@triton.jit(do_not_specialize=["longest", "stride"])
def inverse_kernel(
    covariance_ptr,
    sizes_ptr,
    starts_ptr,
    known_ptr,
    known_starts_ptr,
    out_ptr,
    longest,
    stride,
    noise,
    least_noise,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COPIES: tl.constexpr,
):
    """One chunk. Grid (num_chunks,): out [num_known, stride] fp32, the inverse of the covariance of its recomputed rows
    plus their noise, in place.

    Sweeps minus the matrix, BLOCK_P rows at a time, which leaves its inverse. COPIES: the number of warps.
    """
    chunk = tl.program_id(0)
    begin = tl.load(starts_ptr + chunk)
    first = tl.load(known_starts_ptr + chunk)
    count = tl.load(known_starts_ptr + chunk + 1) - first
    if count == 0:
        return
    index = tl.arange(0, BLOCK_M)
    mean = 0.0
    for start in range(0, count, BLOCK_M):
        mean += tl.sum(tl.load(sizes_ptr + first + start + index, mask=start + index < count, other=0.0), 0)
    mean = tl.maximum(mean / count, 1e-30)
    inverse_ptr = out_ptr + first.to(tl.int64) * stride
    covariance_ptr += first.to(tl.int64) * longest
    for above in range(0, count, BLOCK_P):
        rows = above + tl.arange(0, BLOCK_P)
        size = tl.load(sizes_ptr + first + rows, mask=rows < count, other=0.0)
        own = noise * tl.maximum(size / mean, least_noise)
        for left in range(0, count, BLOCK_M):
            columns = left + index
            at = tl.load(known_ptr + first + columns, mask=columns < count, other=0) - begin
            mask = (rows < count)[:, None] & (columns < count)[None, :]
            a = tl.load(covariance_ptr + (rows[:, None] * longest + at[None, :]), mask=mask, other=0.0)
            a = -a - tl.where(rows[:, None] == columns[None, :], own[:, None], 0.0)
            tl.store(inverse_ptr + (rows[:, None] * stride + columns[None, :]), a, mask=mask)
    for start in range(0, count, BLOCK_P):
        tl.debug_barrier()
        _sweep_pivots(inverse_ptr, stride, start, count, BLOCK_P, COPIES)
        tl.debug_barrier()
        _change_pivots(inverse_ptr, stride, start, count, BLOCK_M, BLOCK_P)
        tl.debug_barrier()
        _change_others(inverse_ptr, stride, start, count, BLOCK_M, BLOCK_P)
        tl.debug_barrier()
        _mirror_pivots(inverse_ptr, stride, start, count, BLOCK_M, BLOCK_P)


@triton.jit(do_not_specialize=["stride"])
def weights_kernel(
    inverse_ptr,
    change_ptr,
    common_ptr,
    known_starts_ptr,
    out_ptr,
    stride,
    less_common,
    K_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A tile of recomputed rows by channels of one chunk. Grid (num_chunks, tiles of the most recomputed, tiles of both
    widths): out [num_known, 2 * K_WIDTH] fp32, inverse times change, where K changes less by a share of the common
    change."""
    chunk = tl.program_id(0)
    first = tl.load(known_starts_ptr + chunk)
    count = tl.load(known_starts_ptr + chunk + 1) - first
    tile = tl.program_id(1)
    if tile * BLOCK_M >= count:
        return
    index = tl.arange(0, BLOCK_M)
    channels = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    real = channels < 2 * K_WIDTH
    common = tl.load(common_ptr + chunk * K_WIDTH + channels, mask=channels < K_WIDTH, other=0.0) * less_common
    acc = tl.zeros([BLOCK_M, BLOCK_W], dtype=tl.float32)
    for start in range(0, count, BLOCK_M):
        at, mask = _tile(inverse_ptr + first.to(tl.int64) * stride, stride, tile, start // BLOCK_M, count, BLOCK_M)
        rows = start + index
        inside = (rows < count)[:, None] & real[None, :]
        from_ptrs = change_ptr + (first + rows).to(tl.int64)[:, None] * (2 * K_WIDTH) + channels[None, :]
        change = tl.load(from_ptrs, mask=inside, other=0.0) - common[None, :]
        change = tl.where(inside, change, 0.0)
        acc = _matrix_product(tl.load(at, mask=mask, other=0.0), change, acc)
    rows = tile * BLOCK_M + index
    to = out_ptr + (first + rows).to(tl.int64)[:, None] * (2 * K_WIDTH) + channels[None, :]
    tl.store(to, acc, mask=(rows < count)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["longest"])
def move_stale_kernel(
    covariance_ptr,
    weights_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    starts_ptr,
    known_starts_ptr,
    sizes_ptr,
    longest,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DAMPED: tl.constexpr,
):
    """A tile of rows of one chunk, one head of K or V. Grid (num_chunks, tiles of the longest, 2 * num_kv_heads): adds
    covariance times weights to the pool, in place. DAMPED: a small V moves less. Recomputed rows are written too: fresh
    values overwrite them later."""
    chunk = tl.program_id(0)
    part = tl.program_id(2)
    head = part % NUM_KV_HEADS
    begin = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    first = tl.load(known_starts_ptr + chunk)
    count = tl.load(known_starts_ptr + chunk + 1) - first
    start = tl.program_id(1) * BLOCK_N
    if count == 0:
        return
    if begin + start >= end:
        return
    local = start + tl.arange(0, BLOCK_N)
    real = begin + local < end
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HEAD_DIM // 2
    index = tl.arange(0, BLOCK_M)
    acc1 = tl.zeros([BLOCK_N, BLOCK_HALF], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_HALF], dtype=tl.float32)
    for at in range(0, count, BLOCK_M):
        numbers = (first + at + index).to(tl.int64)
        own = at + index < count
        ptrs = covariance_ptr + numbers[None, :] * longest + local[:, None]
        cross = tl.load(ptrs, mask=own[None, :] & real[:, None], other=0.0)
        ptrs = weights_ptr + (numbers * (2 * NUM_KV_HEADS) + part)[:, None] * HEAD_DIM + dims[None, :]
        inside = own[:, None] & in_half[None, :]
        acc1 = _matrix_product(cross, tl.load(ptrs, mask=inside, other=0.0), acc1)
        acc2 = _matrix_product(cross, tl.load(ptrs + HEAD_DIM // 2, mask=inside, other=0.0), acc2)
    rows = begin + local
    mask = real[:, None] & in_half[None, :]
    slots = tl.load(slots_ptr + rows, mask=real, other=0)
    to = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    if part < NUM_KV_HEADS:
        table = rows[:, None] * HEAD_DIM + dims[None, :]
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
        y1, y2 = rotate(acc1, acc2, cos, sin)
        x1, x2 = halves_of(k_ptr, k_scale_ptr, slots, head, dims, mask, NUM_KV_HEADS, HEAD_DIM)
        factor = 1.0
        if k_scale_ptr is not None:
            factor = 1.0 / tl.load(k_scale_ptr + head)
        tl.store(k_ptr + to, to_pool((x1 + y1) * factor, k_ptr), mask=mask)
        tl.store(k_ptr + to + HEAD_DIM // 2, to_pool((x2 + y2) * factor, k_ptr), mask=mask)
    else:
        if DAMPED:
            mean = 0.0
            for at in range(begin, end, BLOCK_M):
                mean += tl.sum(tl.load(sizes_ptr + at + index, mask=at + index < end, other=0.0), 0)
            mean = tl.maximum(mean / (end - begin), 1e-30)
            share = tl.minimum(tl.load(sizes_ptr + rows, mask=real, other=0.0) / mean, 1.0)[:, None]
            acc1 *= share
            acc2 *= share
        x1, x2 = halves_of(v_ptr, v_scale_ptr, slots, head, dims, mask, NUM_KV_HEADS, HEAD_DIM)
        factor = 1.0
        if v_scale_ptr is not None:
            factor = 1.0 / tl.load(v_scale_ptr + head)
        tl.store(v_ptr + to, to_pool((x1 + acc1) * factor, v_ptr), mask=mask)
        tl.store(v_ptr + to + HEAD_DIM // 2, to_pool((x2 + acc2) * factor, v_ptr), mask=mask)


def correct_stale(
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    rows: Regressed,
    rotation: tuple[Tensor, Tensor],
    prior: RegressionPrior,
    damped: bool,
) -> None:
    """`KernelBackend.correct_stale`. Rows of k and v may be strided."""
    _check(k, v, cache, rows, *rotation)
    num_known, num_chunks = len(rows.known), len(rows.starts) - 1
    if num_known == 0 or num_chunks == 0:
        return
    num_kv_heads, head_dim = k.shape[1:]
    width = num_kv_heads * head_dim
    stride = -(-min(num_known, rows.longest) // BLOCK) * BLOCK
    kept = rows.__dict__.setdefault("_workspaces", {})  # the layers of a pass write the same memory again
    of_shape = num_kv_heads, head_dim, k.dtype
    if of_shape not in kept:
        kept[of_shape] = Workspace.of(rows, 2 * width, 2 * num_kv_heads, stride, k)
    w = kept[of_shape]
    pool = pool_bits(cache.k), pool_bits(cache.v), cache.k_scale, cache.v_scale, *rotation, rows.slots
    of_head = {"NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_HALF": max(16, padded(head_dim // 2))}
    heads, tiles = padded(num_kv_heads), tiles_of(head_dim, k.element_size())
    known_tiles = stride // BLOCK
    with device_guard(k):
        chunk_spread_kernel[(num_chunks, 2 * num_kv_heads)](
            *pool,
            rows.starts,
            w.mean,
            w.spread,
            **of_head,
            BLOCK_ROWS=tiles.spread,
            num_warps=8,
        )
        standardise_kernel[(num_chunks, rows.longest)](
            *pool, rows.starts, w.mean, w.spread, w.points, w.norms, w.sizes,
            **of_head, BLOCK_HEADS=heads, num_warps=4,
        )  # fmt: skip
        change_kernel[(num_known,)](
            k, v, *pool, rows.known, rows.known_starts, rows.fresh, w.change, w.change_sizes,
            num_chunks, k.stride(0), v.stride(0), **of_head, BLOCK_HEADS=heads, num_warps=4,
        )  # fmt: skip
        common_kernel[(num_chunks, -(-width // COMMON_CHANNELS))](
            w.change, rows.known_starts, w.common,
            K_WIDTH=width, BLOCK_M=COMMON_ROWS, BLOCK_W=COMMON_CHANNELS, num_warps=4,
        )  # fmt: skip
        covariance_kernel[(num_chunks, known_tiles, -(-rows.longest // BLOCK))](
            w.points, w.norms, rows.starts, rows.known, rows.known_starts, w.covariance,
            rows.longest, prior.of_chunk, prior.of_near, *prior.lengths,
            WIDTH=2 * width, BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=tiles.channels, num_warps=4,
        )  # fmt: skip
        inverse_kernel[(num_chunks,)](
            w.covariance, w.change_sizes, rows.starts, rows.known, rows.known_starts, w.inverse,
            rows.longest, stride, prior.noise, prior.least_noise,
            BLOCK_M=BLOCK, BLOCK_P=PIVOT_ROWS, COPIES=PIVOT_WARPS, num_warps=PIVOT_WARPS,
        )  # fmt: skip
        weights_kernel[(num_chunks, known_tiles, -(-2 * width // BLOCK))](
            w.inverse, w.change, w.common, rows.known_starts, w.weights, stride, 1 - prior.common,
            K_WIDTH=width, BLOCK_M=BLOCK, BLOCK_W=BLOCK, num_warps=4,
        )  # fmt: skip
        move_stale_kernel[(num_chunks, -(-rows.longest // tiles.moved), 2 * num_kv_heads)](
            w.covariance, w.weights, *pool, rows.starts, rows.known_starts, w.sizes, rows.longest,
            **of_head, BLOCK_M=tiles.known, BLOCK_N=tiles.moved, DAMPED=damped, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class Workspace:
    """Results between the kernels of a correction. fp32 but for points; width: of K and V of a row together."""

    mean: Tensor  # [num_chunks, width]
    spread: Tensor  # [num_chunks, heads of K and V]
    points: Tensor  # [num_rows, width], standardised rows
    norms: Tensor  # [num_rows]
    sizes: Tensor  # [num_rows]
    change: Tensor  # [num_known, width]
    change_sizes: Tensor  # [num_known]
    common: Tensor  # [num_chunks, width / 2]
    weights: Tensor  # [num_known, width]
    covariance: Tensor  # [num_known, longest]
    inverse: Tensor  # [num_known, stride]

    @classmethod
    def of(cls, rows: Regressed, width: int, heads: int, stride: int, like: Tensor) -> Workspace:
        """Allocate for rows with K and V of `width` each, in `heads` heads together, on the device of `like`."""
        num_known, num_rows, num_chunks = len(rows.known), len(rows.slots), len(rows.starts) - 1

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        return cls(
            empty(num_chunks, width),
            empty(num_chunks, heads),
            empty(num_rows, width, dtype=like.dtype),
            empty(num_rows),
            empty(num_rows),
            empty(num_known, width),
            empty(num_known),
            empty(num_chunks, width // 2),
            empty(num_known, width),
            empty(num_known, rows.longest),
            empty(num_known, stride),
        )


@dataclass(frozen=True)
class Tiles:
    """Tile sizes that keep all values in registers."""

    spread: int  # rows of `chunk_spread_kernel`
    channels: int  # of `covariance_kernel`
    moved: int  # rows of `move_stale_kernel`
    known: int  # recomputed rows of `move_stale_kernel`


@cache
def tiles_of(head_dim: int, element_size: int) -> Tiles:
    narrow = head_dim <= 128
    return Tiles(
        64 if narrow else 16, 16 if element_size == 4 else 64, 64 if narrow else 16, 32 if head_dim <= 256 else 16
    )


@once
def _check(k: Tensor, v: Tensor, cache: LayerCache, rows: Regressed, cos: Tensor, sin: Tensor) -> None:
    check_cache(cache)
    check_heads("k", k)
    check_heads("v", v)
    held = tuple(cache.k.shape[2:])
    check(k.shape == v.shape and tuple(k.shape[1:]) == held, f"rows of {list(k.shape[1:])}, slots of {list(held)}")
    num_rows, num_known, num_chunks = len(rows.slots), len(rows.known), len(rows.starts) - 1
    check_rope(cos, sin, num_rows, held[1])
    check_tensor("slots", rows.slots, (num_rows,), torch.int64)
    check_tensor("starts", rows.starts, (num_chunks + 1,), torch.int32)
    check_tensor("known", rows.known, (num_known,), torch.int32)
    check_tensor("known_starts", rows.known_starts, (num_chunks + 1,), torch.int32)
    check_tensor("fresh", rows.fresh, (num_known,), torch.int64)
    check_device(k, v, cos, sin, *tensors_of(cache), *tensors_of(rows))
