"""Shared parts of prefill and decode attention: addressing paged keys, one step of online softmax, joining splits.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiling: FlashAttention-2, arXiv 2307.08691; splitting
the context: Flash-Decoding (Dao et al., 2023). Logits are kept in base 2, since exp2 is one instruction.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.checks import pool_bits
from cacheblend_kernels.triton_backend.configs import TileConfig, padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, acc):
    """a @ b + acc in fp32, without TF32. bf16 is widened in the interpreter, which would multiply its raw bits."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def key_slots(
    table_ptr, first_slot, start, offsets, hi, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """Return slots [BLOCK_N] int64 of the keys at positions start + offsets; start is a multiple of BLOCK_N."""
    if CONTIGUOUS:
        return first_slot + start + offsets.to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + (start % BLOCK_SIZE + offsets)
    key_pos = start + offsets
    block = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=key_pos < hi, other=0).to(tl.int64)
    return block * BLOCK_SIZE + key_pos % BLOCK_SIZE


@triton.jit
def key_slot(table_ptr, first_slot, start, BLOCK_SIZE: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Return the slot (int32) of the key at position start."""
    if CONTIGUOUS:
        return first_slot + start
    return tl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE


@triton.jit
def load_keys(
    ptr,
    slots,
    kv_head,
    dims,
    visible,
    dtype: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Load K or V [BLOCK_N, BLOCK_D] of one head in the dtype of the product. BOUNDED: keys that are not `visible` are
    read as zeros, so that NaN in unused slots cannot reach a sum."""
    ptrs = ptr + slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dims[None, :]
    if BOUNDED:
        if BLOCK_D == HEAD_DIM:
            tile = tl.load(ptrs, mask=visible[:, None], other=0)
        else:
            tile = tl.load(ptrs, mask=visible[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    else:
        if BLOCK_D == HEAD_DIM:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0)
    if tile.dtype == tl.uint8:
        return e4m3_to_fp32(tile).to(dtype)
    return tile.to(dtype)


@triton.jit
def start_of_softmax(sinks_ptr, heads, own, split, BLOCK_M: tl.constexpr):
    """Return total and peak [BLOCK_M] fp32 before the first key. With sinks, the first split starts with one logit
    without a value."""
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 — one is a constant, the other a value of the program
        if split == 0:
            total += 1.0
            peak = tl.load(sinks_ptr + heads, mask=own, other=0.0) * LOG2E
    return total, peak


@triton.jit
def score(q, k, scale, soft_cap):
    """q k^T [M, N] fp32, to be multiplied by `score_factor`. scale includes log2(e) unless there is a soft cap."""
    logits = product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], dtype=tl.float32))
    if soft_cap is not None:
        # tanh x = 1 - 2 / (exp 2x + 1): no overflow at either end
        capped = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E * scale / soft_cap)) + 1.0)
        logits = capped * (soft_cap * LOG2E)
    return logits


@triton.jit
def score_factor(scale, soft_cap):
    """Factor that turns scores into base-2 logits. Applied inside exp2's multiply-add, not to the tile."""
    if soft_cap is not None:
        return 1.0
    return scale


@triton.jit
def softmax_step(acc, total, peak, q, k, v, shown, scale, soft_cap, MASKED: tl.constexpr):
    """Add one tile of keys to the running softmax.

    acc [M, D], total [M], peak [M] fp32; q [M, D], k, v [N, D]; shown [M, N]: which row sees which key (MASKED only).
    soft_cap: None for none.
    """
    logits = score(q, k, scale, soft_cap)
    factor = score_factor(scale, soft_cap)
    if MASKED:
        logits = tl.where(shown, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
    base = new_peak
    if MASKED:  # for rows that have not seen a key yet
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(logits * factor - base[:, None])
    alpha = tl.exp2(peak - base)
    total = total * alpha + tl.sum(p, 1)
    acc = product(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, total, new_peak


@triton.jit
def softmax_step_pair(acc, total, peak, q, k0, v0, k1, v1, scale, soft_cap):
    """`softmax_step` for two tiles of keys that every row sees: acc is rescaled once, and both products of q with keys
    come before the exponentials. (Triton's compiler does not overlap one tile's product with the other's exponentials:
    it waits for each product where it is used.)"""
    logits0 = score(q, k0, scale, soft_cap)
    logits1 = score(q, k1, scale, soft_cap)
    factor = score_factor(scale, soft_cap)
    new_peak = tl.maximum(peak, tl.maximum(tl.max(logits0, 1), tl.max(logits1, 1)) * factor)
    p0 = tl.exp2(logits0 * factor - new_peak[:, None])
    p1 = tl.exp2(logits1 * factor - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    total = total * alpha + (tl.sum(p0, 1) + tl.sum(p1, 1))
    acc = product(p0.to(v0.dtype), v0, acc * alpha[:, None])
    acc = product(p1.to(v1.dtype), v1, acc)
    return acc, total, new_peak


@triton.jit
def join_splits_kernel(part_ptr, lse_ptr, out_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """One (row, head): the softmax-weighted mean of its splits. Splits that saw no key have lse = -inf."""
    index = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + index * SPLITS + splits)
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    seen = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    part = tl.load(part_ptr + (index * SPLITS + splits[:, None]) * HEAD_DIM + dims[None, :], mask=seen, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + index * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def most_keys(meta: AttentionMetadata, block_size: int, sliding_window: int | None) -> int:
    """Return an upper bound on the keys a row sees, without a device synchronisation."""
    most = meta.max_kv_len or meta.block_table.shape[1] * block_size
    return most if sliding_window is None else min(most, sliding_window)


def score_arguments(q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams) -> dict[str, Any]:
    """Return the arguments that every kernel with scores takes: None for what a layer does not have."""
    slot, (block_size, num_kv_heads, head_dim) = meta.contiguous_slot, cache.k.shape[1:]
    return {
        "q_ptr": q,
        "k_ptr": pool_bits(cache.k),
        "table_ptr": meta.block_table,
        "k_scale_ptr": cache.k_scale,
        "first_slot": max(0, slot),
        "q_stride": q.stride(0),
        "scale": params.scale,
        "soft_cap": params.soft_cap,
        "window": params.sliding_window,
        "GROUP": q.shape[1] // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_SIZE": block_size,
        "CONTIGUOUS": slot >= 0,
    }


def attention_arguments(
    q: Tensor,
    cache: LayerCache,
    meta: AttentionMetadata,
    params: AttentionParams,
    config: TileConfig,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> dict[str, Any]:
    """Return the arguments that both attention kernels take. outputs: the result, and `split_buffers`."""
    out, part, lse = outputs
    return score_arguments(q, cache, meta, params) | {
        "v_ptr": pool_bits(cache.v),
        "out_ptr": out,
        "part_ptr": part,
        "lse_ptr": lse,
        "v_scale_ptr": cache.v_scale,
        "sinks_ptr": params.sinks,
        "table_stride": meta.block_table.stride(0),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLITS": part.shape[2],
        "num_warps": config.num_warps,
    }


def split_buffers(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return buffers for partial results [num_rows, num_heads, splits, head_dim] and their base-2 log-sum-exp."""
    if splits == 1:
        return _unused(q.device)
    rows, heads, dim = q.shape
    part = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
    return part, torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)


@cache
def _unused(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return buffers that a launch without splits neither reads nor writes."""
    return torch.empty(1, 1, 1, 1, device=device), torch.empty(1, 1, 1, device=device)


def join_splits(part: Tensor, lse: Tensor, out: Tensor) -> None:
    """out [num_rows, num_heads, head_dim] from part [num_rows, num_heads, splits, head_dim] and lse (base 2), fp32."""
    num_rows, num_heads, splits, head_dim = part.shape
    join_splits_kernel[(num_rows * num_heads,)](
        part,
        lse,
        out,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        SPLITS=splits,
        num_warps=4,
    )
