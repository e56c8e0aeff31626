"""Attention of scattered rows over the paged pool, causal by position.

Rows need not be consecutive: each carries its position, and a tile of rows walks the keys from the first one its first
row may see up to the position of its last row. Most key tiles lie below the first row's position and need no mask;
only the edges do, and nothing of size rows x keys is materialised. The heads that share a KV head (GQA) are rows of
the same tile, so K and V are read once for all of them. With few rows and a long context the key range is split over
programs and joined afterwards.

On Hopper and newer, key tiles that need no mask are copied by the tensor memory accelerator, two tiles per step: a
block of the pool is a box of it, so paging costs one look-up per tile.

After FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180) and Flash-Decoding; the scattered rows
are those of CacheBlend's selective recomputation (arXiv 2405.16444).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.attention_core import (
    LOG2E,
    attention_arguments,
    join_splits,
    key_slot,
    key_slots,
    load_keys,
    most_keys,
    softmax_step,
    softmax_step_pair,
    split_buffers,
    start_of_softmax,
)
from cacheblend_kernels.triton_backend.checks import (
    check_attention,
    check_rows,
    check_sequences,
    device_guard,
    is_float8,
)
from cacheblend_kernels.triton_backend.configs import (
    LaunchPlan,
    TileConfig,
    copies_tiles,
    num_context_splits,
    num_tiles,
    pick_prefill_config,
    prefill_configs,
)


@triton.jit
def _walk_keys(
    acc,
    total,
    peak,
    q,
    row_pos,
    k_ptr,
    v_ptr,
    table_ptr,
    first_slot,
    kv_head,
    k_factor,
    begin,
    end,
    lo,
    hi,
    scale,
    soft_cap,
    window,
    BLOCK_N: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys begin..end-1 in steps of BLOCK_N. MASKED: some rows do not see some of them."""
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key_pos = start + offsets
        slots = key_slots(table_ptr, first_slot, start, offsets, hi, BLOCK_N, BLOCK_SIZE, CONTIGUOUS)
        real = (key_pos >= lo) & (key_pos < hi)
        k = load_keys(k_ptr, slots, kv_head, dims, real, q.dtype, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, MASKED)
        v = load_keys(v_ptr, slots, kv_head, dims, real, q.dtype, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, MASKED)
        shown = key_pos[None, :] <= row_pos[:, None]
        if window is not None:
            shown = shown & (key_pos[None, :] > row_pos[:, None] - window)
        acc, total, peak = softmax_step(acc, total, peak, q, k, v, shown, scale * k_factor, soft_cap, MASKED)
    return acc, total, peak


@triton.jit
def _walk_pairs(
    acc,
    total,
    peak,
    q,
    k_desc,
    v_desc,
    table_ptr,
    first_slot,
    kv_head,
    begin,
    pairs,
    scale,
    soft_cap,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Attend to `pairs` pairs of key tiles from `begin` on, all of them seen by every row.

    A tile lies in one block, so it is one box of the pool for Hopper's copy engine: the threads compute no addresses.
    The next pair's blocks are looked up a step ahead, so that copies never wait for the block table.
    """
    step: tl.constexpr = 2 * BLOCK_N
    last = begin + pairs * step - BLOCK_N  # the last tile: the table is not read beyond it
    slot0 = 0
    slot1 = 0
    if pairs > 0:
        slot0 = key_slot(table_ptr, first_slot, begin, BLOCK_SIZE, CONTIGUOUS)
        slot1 = key_slot(table_ptr, first_slot, begin + BLOCK_N, BLOCK_SIZE, CONTIGUOUS)
    for pair in range(0, pairs):
        after = begin + (pair + 1) * step
        after0 = key_slot(table_ptr, first_slot, tl.minimum(after, last), BLOCK_SIZE, CONTIGUOUS)
        after1 = key_slot(table_ptr, first_slot, tl.minimum(after + BLOCK_N, last), BLOCK_SIZE, CONTIGUOUS)
        k0 = k_desc.load([slot0, kv_head * HEAD_DIM])
        k1 = k_desc.load([slot1, kv_head * HEAD_DIM])
        v0 = v_desc.load([slot0, kv_head * HEAD_DIM])
        v1 = v_desc.load([slot1, kv_head * HEAD_DIM])
        acc, total, peak = softmax_step_pair(acc, total, peak, q, k0, v0, k1, v1, scale, soft_cap)
        slot0 = after0
        slot1 = after1
    return acc, total, peak


@triton.jit(do_not_specialize=["num_seqs", "first_slot", "table_stride", "window"])
def prefill_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    out_ptr,
    part_ptr,
    lse_ptr,
    positions_ptr,
    cu_rows_ptr,
    table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    num_seqs,
    first_slot,
    table_stride,
    q_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """One tile of rows of one sequence, one KV head, one split of the key range.

    None for scales, sinks, soft_cap or window: the launch has none. k_desc, v_desc: the pools in boxes
    of BLOCK_N slots of one head, None if tiles are not copied.

    Grid (num_kv_heads, tiles, SPLITS). Sequence i owns the tiles from cu_rows[i] // ROWS + i on; the tiles at the end
    of the batch see the most keys and are started first.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)

    low = 0  # the last sequence whose first tile is at or before ours
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        starts_at = tl.load(cu_rows_ptr + middle) // ROWS + middle
        if starts_at <= tile:
            low = middle
        else:
            high = middle
    seq = low
    seq_begin = tl.load(cu_rows_ptr + seq)
    seq_end = tl.load(cu_rows_ptr + seq + 1)
    begin_row = seq_begin + (tile - (seq_begin // ROWS + seq)) * ROWS
    if begin_row >= seq_end:
        return
    last_row = tl.minimum(begin_row + ROWS, seq_end) - 1

    members = tl.arange(0, BLOCK_M)
    rows = begin_row + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    own = (members < ROWS * GROUP) & (rows <= last_row)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    # Members beyond the tile use its last row's position: their results are finite and never stored.
    row_pos = tl.load(positions_ptr + tl.minimum(rows, last_row)).to(tl.int32)
    first_pos = tl.load(positions_ptr + begin_row).to(tl.int32)
    last_pos = tl.load(positions_ptr + last_row).to(tl.int32)
    q_offsets = rows.to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=own[:, None] & in_head[None, :], other=0.0)

    # Some row sees keys lo..hi-1, all rows see inner_lo..inner_hi-1.
    hi = last_pos + 1
    inner_hi = (first_pos + 1) // BLOCK_N * BLOCK_N
    if window is not None:
        lo = tl.maximum(first_pos - window + 1, 0)
        inner_lo = (tl.maximum(last_pos - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    else:
        lo = 0
        inner_lo = 0
    begin = lo // BLOCK_N * BLOCK_N
    end = hi
    if SPLITS > 1:
        tiles_each = ((hi - begin + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS
        begin += split * tiles_each * BLOCK_N
        end = tl.minimum(begin + tiles_each * BLOCK_N, hi)
    inner_lo = tl.minimum(tl.maximum(inner_lo, begin), end)
    inner_hi = tl.maximum(tl.minimum(inner_hi, end), inner_lo)
    if k_desc is not None:  # an odd last tile is processed with the edge
        inner_hi = inner_lo + (inner_hi - inner_lo) // (2 * BLOCK_N) * (2 * BLOCK_N)

    k_factor = 1.0
    v_factor = 1.0
    if k_scale_ptr is not None:
        k_factor = tl.load(k_scale_ptr + kv_head)
        v_factor = tl.load(v_scale_ptr + kv_head)
    if soft_cap is None:
        scale = scale * LOG2E
    seq_table = table_ptr + tl.cast(seq, tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total, peak = start_of_softmax(sinks_ptr, heads, own, split, BLOCK_M)
    if window is not None:
        acc, total, peak = _walk_keys(
            acc, total, peak, q, row_pos, k_ptr, v_ptr, seq_table, first_slot, kv_head, k_factor,
            begin, inner_lo, lo, hi, scale, soft_cap, window,
            BLOCK_N, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CONTIGUOUS, True,
        )  # fmt: skip
    if k_desc is not None:
        acc, total, peak = _walk_pairs(
            acc, total, peak, q, k_desc, v_desc, seq_table, first_slot, kv_head,
            inner_lo, (inner_hi - inner_lo) // (2 * BLOCK_N), scale, soft_cap,
            BLOCK_N, HEAD_DIM, BLOCK_SIZE, CONTIGUOUS,
        )  # fmt: skip
    else:
        acc, total, peak = _walk_keys(
            acc, total, peak, q, row_pos, k_ptr, v_ptr, seq_table, first_slot, kv_head, k_factor,
            inner_lo, inner_hi, lo, hi, scale, soft_cap, window,
            BLOCK_N, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CONTIGUOUS, False,
        )  # fmt: skip
    acc, total, peak = _walk_keys(
        acc, total, peak, q, row_pos, k_ptr, v_ptr, seq_table, first_slot, kv_head, k_factor,
        inner_hi, end, lo, hi, scale, soft_cap, window,
        BLOCK_N, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CONTIGUOUS, True,
    )  # fmt: skip

    if SPLITS > 1:  # a row may see no key of this split
        acc = acc * (v_factor / tl.where(total == 0.0, 1.0, total))[:, None]
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
        cell = (rows.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * SPLITS + split
        tl.store(lse_ptr + cell, lse, mask=own)
        tl.store(part_ptr + cell[:, None] * HEAD_DIM + dims[None, :], acc, mask=own[:, None] & in_head[None, :])
    else:
        acc = acc * (v_factor / total)[:, None]
        cell = rows.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + cell[:, None] * HEAD_DIM + dims[None, :], out, mask=own[:, None] & in_head[None, :])


def prefill_attention(
    q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams, plan: LaunchPlan
) -> Tensor:
    """`KernelBackend.prefill_attention`. q: fp16, bf16 or fp32; heads packed, rows may be strided. The pool has q's
    dtype, or float8_e4m3fn. Returns a new contiguous tensor [num_rows, num_heads, head_dim] of q's dtype."""
    contiguous = meta.contiguous_slot >= 0
    check_attention(q, cache, params)
    check_sequences(q, meta.block_table, meta.kv_lens)
    check_rows(q, meta.positions, meta.cu_rows, meta.num_seqs)
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.k.shape[1], cache.k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    keys = most_keys(meta, block_size, params.sliding_window)
    config, tiles, splits, tma = _launch_of(
        plan, head_dim, q.element_size(), is_float8(cache), num_heads // num_kv_heads, num_kv_heads, block_size,
        num_rows, meta.num_seqs, keys, contiguous,
    )  # fmt: skip
    k_desc, v_desc = tile_descriptors(cache, config.block_n) if tma else (None, None)
    part, lse = split_buffers(q, splits)
    with device_guard(q):
        prefill_attention_kernel[(num_kv_heads, tiles, splits)](
            k_desc=k_desc,
            v_desc=v_desc,
            positions_ptr=meta.positions,
            cu_rows_ptr=meta.cu_rows,
            num_seqs=meta.num_seqs,
            num_stages=config.stages(contiguous or tma),
            **attention_arguments(q, cache, meta, params, config, (out, part, lse)),
        )
        if splits > 1:
            join_splits(part, lse, out)
    return out


@lru_cache(maxsize=256)
def _launch_of(
    plan: LaunchPlan,
    head_dim: int,
    element_size: int,
    fp8: bool,
    group: int,
    num_kv_heads: int,
    block_size: int,
    num_rows: int,
    num_seqs: int,
    keys: int,
    contiguous: bool,
) -> tuple[TileConfig, int, int, bool]:
    """Return the tile, the number of tiles and of splits, and whether tiles are copied. The layers of a pass have the
    same."""
    configs = prefill_configs(plan.arch, head_dim, element_size, fp8)
    config = plan.config or pick_prefill_config(configs, group, num_rows, num_kv_heads, plan.num_sms, keys)
    tma = not fp8 and copies_tiles(config, head_dim, element_size, block_size, contiguous)
    tiles = num_tiles(config, group, num_rows, num_seqs)
    return config, tiles, plan.num_splits or num_context_splits(tiles * num_kv_heads, keys, plan.num_sms), tma


def tile_descriptors(cache: LayerCache, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return boxes of block_n slots and one head of both pools. The cache keeps them."""
    kept = cache.__dict__.setdefault("_descriptors", {})
    if block_n not in kept:
        num_blocks, block_size, num_kv_heads, head_dim = cache.k.shape
        shape, strides = [num_blocks * block_size, num_kv_heads * head_dim], [num_kv_heads * head_dim, 1]
        kept[block_n] = tuple(TensorDescriptor(p, shape, strides, [block_n, head_dim]) for p in (cache.k, cache.v))
    found: tuple[TensorDescriptor, TensorDescriptor] = kept[block_n]
    return found
