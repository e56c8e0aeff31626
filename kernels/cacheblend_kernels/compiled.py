"""cpu.c through ctypes: what a CPU computes between the products of a decode step, in one pass each.

It is built when the package is installed, where there is a C compiler. Each function returns None for what the compiled code
does not take (no such code, another dtype, a width that is no multiple of 16): torch's operations then do the same, equal up
to the order of sums; `round_rows` and `rope_and_cache` are equal to the bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, KernelError, LayerCache, Slots

ABI, LANES, CHUNK, MAX_DIM = 1, 16, 256, 256  # as in cpu.c
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALONE = 1 << 15  # values up to which a second thread costs more than it saves


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "table", "lens", "out", "partial")),
        *((name, ctypes.c_int64) for name in ("seqs", "heads", "kv_heads", "dim", "block_size", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("chunks", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type", "threads")),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "slots", "q_out", "k_pool", "v_pool")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "num_slots")),
        ("type", ctypes.c_int32),
    ]


@cache
def library() -> Any:
    """The compiled code, which runs without the interpreter lock; None where it was not built or does not load."""
    found = importlib.util.find_spec("cacheblend_kernels._cpu")
    if found is None or found.origin is None:
        return None
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    try:
        code = ctypes.CDLL(found.origin)
        if ctypes.c_int32.in_dll(code, "cb_abi").value != ABI:
            return None
        code.cb_rms_norm.argtypes = [*[address] * 4, count, count, ctypes.c_float, number, number, number]
        code.cb_round_rows.argtypes = [*[address] * 3, count, count, number, number, number]
        code.cb_decode_attention.argtypes = [ctypes.POINTER(_Attention)]
        code.cb_rope_and_cache.argtypes = [ctypes.POINTER(_Rope), number]
    except (OSError, AttributeError, ValueError):  # built for another machine, or of another version
        return None
    for function in (code.cb_rms_norm, code.cb_round_rows, code.cb_decode_attention):
        function.restype = None
    return code


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | None:
    """RMSNorm of x, or of residual + x, which residual then holds. x, residual: [..., dim] of one dtype; weight: [dim] of the
    same, or fp32."""
    code, kind, dim = library(), _TYPES.get(x.dtype), x.shape[-1]
    if code is None or kind is None or dim % LANES or not x.is_cpu or weight.dtype not in (x.dtype, torch.float32):
        return None
    if weight.shape != (dim,) or not weight.is_cpu:
        return None
    if residual is not None and (residual.dtype, residual.shape, residual.is_contiguous()) != (x.dtype, x.shape, True):
        return None
    x, weight = x.contiguous(), weight.contiguous()
    out, added_to = torch.empty_like(x), None if residual is None else residual.data_ptr()
    types = kind, _TYPES[weight.dtype]
    num_rows = x.numel() // dim
    addresses = x.data_ptr(), added_to, weight.data_ptr(), out.data_ptr()
    code.cb_rms_norm(*addresses, num_rows, dim, eps, *types, _threads(x.numel()))
    return out


def round_rows(x: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """x [num_rows, dim] as uint8 with 128 for zero, and the scale of each row [num_rows, 1], rounded to scale_dtype."""
    code, kind, dim = library(), _TYPES.get(x.dtype), x.shape[-1]
    if code is None or kind is None or scale_dtype not in _TYPES or dim % LANES or not x.is_cpu or x.ndim != 2:
        return None
    x = x.contiguous()
    whole, scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), 1, dtype=scale_dtype)
    addresses = x.data_ptr(), whole.data_ptr(), scale.data_ptr()
    code.cb_round_rows(*addresses, len(x), dim, kind, _TYPES[scale_dtype], _threads(x.numel()))
    return whole, scale


def decode_attention(q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams) -> Tensor | None:
    """`KernelBackend.decode_attention` over pools of q's dtype, in one pass over K and V as they are (a softmax in chunks of
    keys: FlashDecoding). A row's result depends neither on other rows nor on the number of threads."""
    code, kind, (num_rows, num_heads, dim), (k, v) = library(), _TYPES.get(q.dtype), q.shape, (cache.k, cache.v)
    if code is None or kind is None or dim % LANES or dim > MAX_DIM or not q.is_cpu:
        return None
    if params.soft_cap is not None or params.sinks is not None or params.alibi is not None:
        return None
    if not k.dtype == v.dtype == q.dtype or k.shape != v.shape or k.shape[3] != dim or num_heads % k.shape[2]:
        return None
    q, table, lens = q.contiguous(), meta.block_table.contiguous(), meta.kv_lens.contiguous()
    num_seqs, max_blocks = table.shape
    if not table.dtype == lens.dtype == torch.int32 or lens.shape != (num_seqs,) or num_rows < num_seqs:
        return None
    if not (k.is_contiguous() and v.is_contiguous()) or meta.max_kv_len > max_blocks * k.shape[1]:
        return None
    chunks = -(-(meta.max_kv_len or max_blocks * k.shape[1]) // CHUNK)
    out = torch.empty_like(q) if num_rows == num_seqs else torch.zeros_like(q)
    partial = torch.empty(num_seqs * num_heads * chunks * (dim + 2))
    addresses = [x.data_ptr() for x in (q, k, v, table, lens, out, partial)]
    shape = num_seqs, num_heads, k.shape[2], dim, k.shape[1], max_blocks, chunks, params.sliding_window or 0
    code.cb_decode_attention(_Attention(*addresses, *shape, params.scale, kind, torch.get_num_threads()))
    return out


def rope_and_cache(
    q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots
) -> tuple[Tensor | None] | None:
    """`KernelBackend.rope_and_cache` into pools of K's dtype; the rotated q is in a tuple."""
    code, kind, (num_rows, num_kv_heads, dim) = library(), _TYPES.get(k.dtype), k.shape
    parts = (k, v) if q is None else (k, v, q)
    if code is None or kind is None or dim % 2 or v.shape != k.shape or not k.is_cpu:
        return None
    if not cache.k.dtype == cache.v.dtype == k.dtype or any(x.dtype != k.dtype for x in parts):
        return None
    if any(x.stride()[1:] != (dim, 1) for x in parts):
        return None
    cos, sin, where = slots.cos.contiguous(), slots.sin.contiguous(), slots.slots.contiguous()
    if not cos.shape == sin.shape == (num_rows, dim) or not cos.dtype == sin.dtype == torch.float32:
        return None
    if where.shape != (num_rows,) or where.dtype != torch.int64 or any(x.shape[0::2] != (num_rows, dim) for x in parts):
        return None
    if any(pool.shape[2:] != (num_kv_heads, dim) or not pool.is_contiguous() for pool in (cache.k, cache.v)):
        return None
    out = None if q is None else torch.empty(q.shape, dtype=q.dtype)
    addresses = [None if x is None else x.data_ptr() for x in (q, k, v, cos, sin, where, out, cache.k, cache.v)]
    shape = num_rows, 0 if q is None else q.shape[1], num_kv_heads, dim
    strides = 0 if q is None else q.stride(0), k.stride(0), v.stride(0)
    arguments = _Rope(*addresses, *shape, *strides, cache.k.shape[0] * cache.k.shape[1], kind)
    if code.cb_rope_and_cache(arguments, _threads(sum(x.numel() for x in parts))):
        raise KernelError("rows go to slots that the pool does not have", "slots are below num_blocks * block_size")
    return (out,)


def _threads(num_values: int) -> int:
    return 1 if num_values <= _ALONE else torch.get_num_threads()
