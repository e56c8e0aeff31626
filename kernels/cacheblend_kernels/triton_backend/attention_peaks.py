"""The largest softmax weight that any row and head gives each key: what a selector follows the question by.

Two launches: the first finds each row's log-sum-exp, over splits of the context (Flash-Decoding), the second takes
the maximum of the weights. Nothing of size rows x keys is materialised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.attention_core import (
    LOG2E,
    key_slots,
    load_keys,
    score,
    score_arguments,
    score_factor,
    start_of_softmax,
)
from cacheblend_kernels.triton_backend.checks import (
    check,
    check_attention,
    check_device,
    check_sequences,
    check_tensor,
    device_guard,
    once,
)
from cacheblend_kernels.triton_backend.configs import padded

SPLITS = 16  # of the keys, whatever their number: one compiled kernel, and enough programs for few rows


@triton.jit
def _logits(
    q_ptr,
    k_ptr,
    positions_ptr,
    table_ptr,
    k_scale_ptr,
    members,
    kv_head,
    start,
    num_rows,
    kv_len,
    first_slot,
    q_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Return base-2 logits [M, BLOCK_N] of the members (rows x heads of the group) of one KV head with the keys from
    `start` on; -inf where a row sees no key, or is none."""
    rows = members // GROUP
    heads = kv_head * GROUP + members % GROUP
    own = rows < num_rows
    dims = tl.arange(0, BLOCK_D)
    key_pos = start + tl.arange(0, BLOCK_N)
    q_at = rows.to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=own[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    slots = key_slots(table_ptr, first_slot, start, tl.arange(0, BLOCK_N), kv_len, BLOCK_N, BLOCK_SIZE, CONTIGUOUS)
    k = load_keys(k_ptr, slots, kv_head, dims, key_pos < kv_len, q.dtype, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, True)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + kv_head)
    if soft_cap is None:
        scale = scale * LOG2E
    logits = score(q, k, scale, soft_cap) * score_factor(scale, soft_cap)
    row_pos = tl.load(positions_ptr + rows, mask=own, other=-1).to(tl.int32)
    shown = key_pos[None, :] <= row_pos[:, None]
    if window is not None:
        shown = shown & (key_pos[None, :] > row_pos[:, None] - window)
    return tl.where(shown, logits, float("-inf"))


@triton.jit(do_not_specialize=["num_rows", "first_slot", "window"])
def row_lse_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    table_ptr,
    k_scale_ptr,
    sinks_ptr,
    lse_ptr,
    kv_lens_ptr,
    num_rows,
    first_slot,
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
    """One KV head, a tile of rows, one split of the keys. Grid (num_kv_heads, tiles, SPLITS): base-2 log-sum-exp, fp32
    [num_kv_heads, num_rows * GROUP, SPLITS]."""
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr)
    members = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = members < num_rows * GROUP
    tiles_each = ((kv_len + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS
    begin = split * tiles_each * BLOCK_N
    end = tl.minimum(begin + tiles_each * BLOCK_N, kv_len)
    total, peak = start_of_softmax(sinks_ptr, kv_head * GROUP + members % GROUP, own, split, BLOCK_M)
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        logits = _logits(
            q_ptr, k_ptr, positions_ptr, table_ptr, k_scale_ptr, members, kv_head, start, num_rows, kv_len,
            first_slot, q_stride, scale, soft_cap, window,
            GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, CONTIGUOUS,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        peak = new_peak
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
    cell = (kv_head.to(tl.int64) * num_rows * GROUP + members) * SPLITS + split
    tl.store(lse_ptr + cell, lse, mask=own)


@triton.jit(do_not_specialize=["num_rows", "first_slot", "window"])
def key_peaks_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    table_ptr,
    k_scale_ptr,
    lse_ptr,
    peaks_ptr,
    kv_lens_ptr,
    num_rows,
    first_slot,
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
    """One KV head, a tile of keys, all rows. Grid (num_kv_heads, tiles of keys). Weights are not negative, so their
    bits are ordered as integers are."""
    kv_head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_N
    start = tl.multiple_of(start, BLOCK_N)
    kv_len = tl.load(kv_lens_ptr)
    if start >= kv_len:
        return
    splits = tl.arange(0, SPLITS)
    found = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first in range(0, num_rows * GROUP, BLOCK_M):
        members = first + tl.arange(0, BLOCK_M)
        own = members < num_rows * GROUP
        logits = _logits(
            q_ptr, k_ptr, positions_ptr, table_ptr, k_scale_ptr, members, kv_head, start, num_rows, kv_len,
            first_slot, q_stride, scale, soft_cap, window,
            GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, CONTIGUOUS,
        )  # fmt: skip
        cell = (kv_head.to(tl.int64) * num_rows * GROUP + members) * SPLITS
        lse = tl.load(lse_ptr + cell[:, None] + splits[None, :], mask=own[:, None], other=0.0)
        peak = tl.max(lse, 1)
        lse = peak + tl.log2(tl.sum(tl.exp2(lse - peak[:, None]), 1))
        lse = tl.where(peak == float("-inf"), 0.0, lse)  # of a row that sees no key
        found = tl.maximum(found, tl.max(tl.exp2(logits - lse[:, None]), 0))
    at = start + tl.arange(0, BLOCK_N)
    tl.atomic_max(peaks_ptr + at, found.to(tl.int32, bitcast=True), mask=at < kv_len)


def attention_peaks(
    q: Tensor,
    positions: Tensor,
    cache: LayerCache,
    meta: AttentionMetadata,
    params: AttentionParams,
    peaks: Tensor,
) -> None:
    """`KernelBackend.attention_peaks`, for the dtypes and strides of `prefill_attention`."""
    check_attention(q, cache, params)
    check_sequences(q, meta.block_table, meta.kv_lens)
    check(meta.num_seqs == 1, f"{meta.num_seqs} sequences, not one")
    _check_peaks(q, positions, peaks)
    num_rows, num_heads, head_dim = q.shape
    if num_rows == 0 or len(peaks) == 0:
        return
    num_kv_heads = cache.k.shape[2]
    group = num_heads // num_kv_heads
    block_m, block_n, num_warps = tile_of(padded(head_dim), q.element_size())
    tiles = -(-num_rows * group // block_m)
    lse = torch.empty(num_kv_heads, num_rows * group, SPLITS, dtype=torch.float32, device=q.device)
    arguments = score_arguments(q, cache, meta, params) | {
        "positions_ptr": positions,
        "lse_ptr": lse,
        "kv_lens_ptr": meta.kv_lens,
        "num_rows": num_rows,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SPLITS": SPLITS,
        "num_warps": num_warps,
    }
    with device_guard(q):
        row_lse_kernel[(num_kv_heads, tiles, SPLITS)](sinks_ptr=params.sinks, **arguments)
        key_peaks_kernel[(num_kv_heads, -(-len(peaks) // block_n))](peaks_ptr=peaks.view(torch.int32), **arguments)


def tile_of(block_d: int, element_size: int) -> tuple[int, int, int]:
    """Return the rows x heads and the keys of a tile, and its warps, for a padded head_dim."""
    if element_size == 4:  # no tensor cores in full fp32: small tiles, or the operands spill
        return 16, 16, 8
    if block_d <= 128:
        return 64, 64, 4
    return (32, 32, 4) if block_d <= 256 else (16, 16, 4)  # more would not fit the shared memory of 8.x


@once
def _check_peaks(q: Tensor, positions: Tensor, peaks: Tensor) -> None:
    check_tensor("positions", positions, q.shape[:1], torch.int64)
    check_tensor("peaks", peaks, tuple(peaks.shape), torch.float32)
    check(peaks.dim() == 1, f"peaks has one dimension, got {list(peaks.shape)}")
    check_device(q, positions, peaks)
