"""Fresh K and V and the paged pool: their rotation, writes, and deviation from the pool's contents.

Rotate-half RoPE (RoFormer, arXiv 2104.09864; the half layout of GPT-NeoX): x1' = x1 cos - x2 sin, x2' = x2 cos + x1
sin, in fp32, cast once. KV deviation: squared distance of fresh K and V from the pool (CacheBlend, arXiv 2405.16444,
section 4.3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import LayerCache, Slots
from cacheblend_kernels.triton_backend.checks import (
    check,
    check_cache,
    check_device,
    check_heads,
    check_rope,
    check_rows_of,
    check_tensor,
    device_guard,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32, fp32_to_e4m3

HEADS_PER_PROGRAM = 16
DEVIATIONS = ("k", "v", "kv")


@triton.jit
def rotate(x1, x2, cos, sin):
    """Return both halves of the rotated head, fp32."""
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def to_pool(x, ptr):
    """Convert x to the pool's dtype; a float8 pool is seen as bytes."""
    if ptr.dtype.element_ty == tl.uint8:
        return fp32_to_e4m3(x)
    return x.to(ptr.dtype.element_ty)


@triton.jit
def _rotate_heads(x_ptr, out_ptr, heads, halves, cos, sin, factor, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write rotate(x) * factor for the heads of one row to out; both pointers are at the row's first head."""
    mask = (heads < NUM_HEADS)[:, None] & (halves < HEAD_DIM // 2)[None, :]
    at = heads[:, None] * HEAD_DIM + halves[None, :]
    x1 = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = rotate(x1, x2, cos, sin)
    tl.store(out_ptr + at, to_pool(y1 * factor, out_ptr), mask=mask)
    tl.store(out_ptr + at + HEAD_DIM // 2, to_pool(y2 * factor, out_ptr), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def rope_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    KV_PROGRAMS: tl.constexpr,
):
    """BLOCK_HEADS heads of one row. Grid (num_rows, KV_PROGRAMS + programs for q): the first ones take K and V.
    NUM_HEADS 0: no q. KV_PROGRAMS 0: no cache write, rotation only. Scales: None for a pool that is not float8."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HEAD_DIM // 2
    cos = tl.load(cos_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    if KV_PROGRAMS > 0:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        if part < KV_PROGRAMS:
            base = tl.load(slots_ptr + row) * (NUM_KV_HEADS * HEAD_DIM)
            mask = (heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
            k_factor = 1.0
            v_factor = 1.0
            if k_scale_ptr is not None:
                k_factor = 1.0 / tl.load(k_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]
                v_factor = 1.0 / tl.load(v_scale_ptr + heads, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]
            _rotate_heads(
                k_ptr + row * k_stride, k_cache_ptr + base, heads, halves, cos, sin, k_factor, NUM_KV_HEADS, HEAD_DIM
            )
            for half in tl.static_range(2):
                at = heads[:, None] * HEAD_DIM + (halves + half * (HEAD_DIM // 2))[None, :]
                v = tl.load(v_ptr + row * v_stride + at, mask=mask, other=0.0)
                v = to_pool(v.to(tl.float32) * v_factor, v_cache_ptr)
                tl.store(v_cache_ptr + base + at, v, mask=mask)
    if NUM_HEADS > 0:
        heads = (part - KV_PROGRAMS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        if part >= KV_PROGRAMS:
            _rotate_heads(
                q_ptr + row * q_stride, q_out_ptr + row * (NUM_HEADS * HEAD_DIM), heads, halves, cos, sin, 1.0,
                NUM_HEADS, HEAD_DIM,
            )  # fmt: skip


def rope_and_cache(q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> Tensor | None:
    """`KernelBackend.rope_and_cache` in one launch. Rows of q, k and v may be strided; the rotated q is packed."""
    _check_write(q, k, v, cache, slots)
    num_rows, num_kv_heads, head_dim = k.shape
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return q_out
    num_heads = 0 if q is None else q.shape[1]
    kv_programs = -(-num_kv_heads // HEADS_PER_PROGRAM)
    q_in = k if q is None else q
    with device_guard(k):
        rope_and_cache_kernel[(num_rows, kv_programs + -(-num_heads // HEADS_PER_PROGRAM))](
            q_in,
            k,
            v,
            slots.cos,
            slots.sin,
            q_in if q_out is None else q_out,
            pool_bits(cache.k),
            pool_bits(cache.v),
            slots.slots,
            cache.k_scale,
            cache.v_scale,
            q_in.stride(0),
            k.stride(0),
            v.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=HEADS_PER_PROGRAM,
            KV_PROGRAMS=kv_programs,
            num_warps=4,
        )
    return q_out


@once
def _check_write(q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> None:
    check_cache(cache)
    check_rows_of(cache, k, v)
    num_rows, _, head_dim = k.shape
    check_rope(slots.cos, slots.sin, num_rows, head_dim)
    check_tensor("slots", slots.slots, (num_rows,), torch.int64)
    if q is not None:
        check_heads("q", q)
        check(q.shape[0] == num_rows and q.shape[2] == head_dim, f"q is {list(q.shape)}, k is {list(k.shape)}")
    check_device(q, k, v, *tensors_of(cache), *tensors_of(slots))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [num_rows, heads, head_dim], rows may be strided, by cos, sin [num_rows, head_dim] fp32; packed."""
    _check_rotation(x, cos, sin)
    num_rows, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    with device_guard(x):
        rope_and_cache_kernel[(num_rows, -(-num_heads // HEADS_PER_PROGRAM))](
            x, x, x, cos, sin, out, out, out, None, None, None,
            x.stride(0), x.stride(0), x.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=1, HEAD_DIM=head_dim, BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=HEADS_PER_PROGRAM, KV_PROGRAMS=0, num_warps=4,
        )  # fmt: skip
    return out


@once
def _check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_heads("x", x)
    check_rope(cos, sin, x.shape[0], x.shape[2])
    check_device(x, cos, sin)


@triton.jit
def _change(x_ptr, pool_ptr, scale_ptr, at, mask, HEAD_DIM: tl.constexpr):
    """Return the differences of fresh values at `at` from the pool's contents, fp32."""
    old = tl.load(pool_ptr + at, mask=mask, other=0)
    if scale_ptr is not None:
        old = e4m3_to_fp32(old) * tl.load(scale_ptr + at // HEAD_DIM, mask=mask, other=0.0)
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - old.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
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
            change = _change(k_ptr + row * k_stride, k_cache_ptr + base, k_scale_ptr, at, mask, HEAD_DIM)
            total += change * change
        if USE_V:
            change = _change(v_ptr + row * v_stride, v_cache_ptr + base, v_scale_ptr, at, mask, HEAD_DIM)
            total += change * change
    tl.store(out_ptr + row, tl.sum(total, 0))


def kv_deviation(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str = "kv") -> Tensor:
    """`KernelBackend.kv_deviation`. Rows may be strided; the differences and their sum are fp32."""
    _check_deviation(k, v, cache, slots, kind)
    out = torch.empty(k.shape[0], dtype=torch.float32, device=k.device)
    if k.shape[0] == 0:
        return out
    width = k.shape[1] * k.shape[2]
    with device_guard(k):
        kv_deviation_kernel[(k.shape[0],)](
            k,
            v,
            pool_bits(cache.k),
            pool_bits(cache.v),
            slots,
            cache.k_scale,
            cache.v_scale,
            out,
            k.stride(0),
            v.stride(0),
            HEAD_DIM=k.shape[2],
            WIDTH=width,
            BLOCK=min(1024, padded(width)),
            USE_K="k" in kind,
            USE_V="v" in kind,
            num_warps=4,
        )
    return out


@once
def _check_deviation(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str) -> None:
    check(kind in DEVIATIONS, f"unknown deviation {kind!r}", f"known: {', '.join(DEVIATIONS)}")
    check_cache(cache)
    check_rows_of(cache, k, v)
    check_tensor("slots", slots, k.shape[:1], torch.int64)
    check_device(k, v, *tensors_of(cache), slots)
