"""Paged decode attention: one new row per sequence, the context split over programs and joined afterwards.

Decode reads every key once with little arithmetic, so it runs at memory bandwidth if enough programs read at once:
a batch that fills the device is not split (PagedAttention v1, arXiv 2309.06180), a small one has its context split
(v2, Flash-Decoding). The heads of a group are the rows of a tile, so K and V are read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.attention_core import (
    LOG2E,
    attention_arguments,
    join_splits,
    key_slots,
    load_keys,
    most_keys,
    softmax_step,
    split_buffers,
    start_of_softmax,
)
from cacheblend_kernels.triton_backend.checks import check, check_attention, check_sequences, device_guard
from cacheblend_kernels.triton_backend.configs import LaunchPlan, decode_config, num_context_splits


@triton.jit(do_not_specialize=["first_slot", "table_stride", "window"])
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    kv_lens_ptr,
    table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
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
    """One sequence, one KV head, one split. Grid (num_kv_heads, num_seqs, SPLITS). None for scales, sinks, soft_cap or
    window: the launch has none.

    The split's length follows kv_lens on the device, so a captured graph stays right as the context grows. Every key
    of the range is seen, except that the range's last tile, and its first under a window, are not full.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    hi = tl.load(kv_lens_ptr + seq)
    lo = hi * 0
    if window is not None:
        lo = tl.maximum(hi - window, 0)
    begin = lo // BLOCK_N * BLOCK_N
    end = hi
    if SPLITS > 1:
        tiles_each = ((hi - begin + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS
        begin += split * tiles_each * BLOCK_N
        end = tl.minimum(begin + tiles_each * BLOCK_N, hi)

    members = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
    own = members < GROUP
    stored = own[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + seq * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=stored, other=0.0)
    k_factor = 1.0
    v_factor = 1.0
    if k_scale_ptr is not None:
        k_factor = tl.load(k_scale_ptr + kv_head)
        v_factor = tl.load(v_scale_ptr + kv_head)
    if soft_cap is None:
        scale = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total, peak = start_of_softmax(sinks_ptr, heads, own, split, BLOCK_M)
    seq_table = table_ptr + seq * table_stride
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key_pos = start + offsets
        slots = key_slots(seq_table, first_slot, start, offsets, hi, BLOCK_N, BLOCK_SIZE, CONTIGUOUS)
        real = (key_pos >= lo) & (key_pos < hi)
        k = load_keys(k_ptr, slots, kv_head, dims, real, q.dtype, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, True)
        v = load_keys(v_ptr, slots, kv_head, dims, real, q.dtype, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, True)
        acc, total, peak = softmax_step(acc, total, peak, q, k, v, real[None, :], scale * k_factor, soft_cap, True)

    acc = acc * (v_factor / tl.where(total == 0.0, 1.0, total))[:, None]
    cell = seq * (NUM_KV_HEADS * GROUP) + heads
    if SPLITS > 1:
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
        tl.store(lse_ptr + cell * SPLITS + split, lse, mask=own)
        tl.store(part_ptr + (cell * SPLITS + split)[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)
    else:
        tl.store(out_ptr + cell[:, None] * HEAD_DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)


def decode_attention(
    q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams, plan: LaunchPlan
) -> Tensor:
    """`KernelBackend.decode_attention`, for the dtypes and strides of `prefill_attention`. A sequence of length 0 gets
    zeros. meta.max_kv_len only chooses the number of splits."""
    contiguous = meta.contiguous_slot >= 0
    check_attention(q, cache, params)
    check_sequences(q, meta.block_table, meta.kv_lens)
    num_seqs, num_heads, head_dim = q.shape
    check(meta.num_seqs == num_seqs, f"{num_seqs} rows, {meta.num_seqs} sequences")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    block_size, num_kv_heads = cache.k.shape[1], cache.k.shape[2]
    config = plan.config or decode_config(head_dim, num_heads // num_kv_heads, q.element_size())
    splits = plan.num_splits or num_context_splits(
        num_seqs * num_kv_heads, most_keys(meta, block_size, params.sliding_window), plan.num_sms
    )
    part, lse = split_buffers(q, splits)
    with device_guard(q):
        decode_attention_kernel[(num_kv_heads, num_seqs, splits)](
            kv_lens_ptr=meta.kv_lens,
            num_stages=config.stages(contiguous),
            **attention_arguments(q, cache, meta, params, config, (out, part, lse)),
        )
        if splits > 1:
            join_splits(part, lse, out)
    return out
