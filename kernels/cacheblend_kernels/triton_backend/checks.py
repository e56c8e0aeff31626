"""Checks of the Triton kernels' assumptions about their tensors.

Checks read no values, so there is no device synchronisation; each runs only for the first launch of a signature
(`once`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVarTuple

import torch
import triton
from torch import Tensor

from cacheblend_kernels.interface import AttentionParams, KernelError, LayerCache, Regressed, Slots, StoredKV

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = torch.float8_e4m3fn
HEAD_DIMS = (*range(16, 257, 8), 512)
MOST_SIGNATURES = 4096
_NOTHING = nullcontext()
_INTERPRETER = threading.RLock()  # Triton's interpreter keeps its state in globals: one launch at a time


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Launch on the tensor's device; interpreter launches are serialised."""
    if tensor.is_cuda:
        there = tensor.device
        return _NOTHING if there.index == torch.cuda.current_device() else torch.cuda.device(there)
    return _INTERPRETER if interpreted() else _NOTHING


Arguments = TypeVarTuple("Arguments")


def once(check: Callable[[*Arguments], None]) -> Callable[[*Arguments], None]:
    """Wrap a check so that it is skipped for arguments that match earlier ones that passed. Arguments match if tensors,
    also in tuples that begin with one, have the same shape, dtype, strides and device, and all other values are equal.
    A dataclass keeps its signature."""
    passed: set[tuple[Any, ...]] = set()

    @wraps(check)
    def checked(*args: *Arguments) -> None:
        signature = tuple(map(_signature, args))
        if signature in passed:
            return
        check(*args)
        if len(passed) >= MOST_SIGNATURES:
            passed.clear()
        passed.add(signature)

    return checked


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    if isinstance(value, AttentionParams | LayerCache | Regressed | Slots | StoredKV):
        known = value.__dict__.get("_signature")
        if known is None:
            known = value.__dict__["_signature"] = tuple(map(_signature, vars(value).values()))
        return known
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
        return tuple(map(_signature, value))
    return value


def tensors_of(given: LayerCache | Regressed | Slots | StoredKV) -> list[Tensor]:
    return [value for value in vars(given).values() if isinstance(value, Tensor)]


def check(condition: bool, message: str, hint: str | None = None) -> None:
    if not condition:
        raise KernelError(message, hint)


def check_tensor(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check for a contiguous tensor of this shape and dtype."""
    found = "None" if x is None else f"{list(x.shape)} {x.dtype}, strides {x.stride()}"
    good = x is not None and x.shape == shape and x.dtype == dtype and x.is_contiguous()
    check(good, f"{name}: {list(shape)} {dtype}, contiguous, is needed, got {found}")


def check_device(*tensors: Tensor | None) -> None:
    """Check that all tensors are on one device that a Triton kernel can access."""
    present = [t for t in tensors if t is not None]
    devices = {t.device for t in present}
    check(len(devices) == 1, f"tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    device = next(iter(devices))
    check(
        device.type == "cuda" or (device.type == "cpu" and interpreted()),
        f"the triton backend cannot reach a tensor on {device}",
        "use the torch backend there",
    )


def check_heads(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Check that x is [num_rows, heads, head_dim]: heads packed, rows may be strided (a fused projection's slice)."""
    check(x.dim() == 3, f"{name} is [num_rows, heads, head_dim], got {list(x.shape)}")
    check(x.dtype in dtypes, f"{name} is {x.dtype}", f"known: {', '.join(map(str, dtypes))}")
    packed = x.shape[0] == 0 or (x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]))
    check(packed, f"{name} has strides {x.stride()}: its heads are not packed", "call .contiguous()")


def check_cache(cache: LayerCache) -> None:
    """Check that a layer's K and V pools have the same shape and dtype, and scales if and only if they are float8."""
    check(cache.k.shape == cache.v.shape and cache.k.dtype == cache.v.dtype, "the K and V pools differ")
    for name, pool in (("k", cache.k), ("v", cache.v)):
        shape = list(pool.shape)
        check(pool.dim() == 4, f"the {name} pool is [num_blocks, block_size, num_kv_heads, head_dim], got {shape}")
        check(pool.is_contiguous(), f"the {name} pool is not contiguous")
    known = (*FLOATS, torch.float8_e4m3fn)
    check(cache.k.dtype in known, f"the pool is {cache.k.dtype}", f"known: {', '.join(map(str, known))}")
    size = cache.k.shape[1]
    check(size > 0 and size & (size - 1) == 0, f"block size {size} is not a power of two")
    if is_float8(cache):
        check_scales("a float8 pool", cache, cache.k.shape[2:3])
    else:
        check(cache.k_scale is None and cache.v_scale is None, "pool scales are for a float8 pool")


def is_float8(cache: LayerCache) -> bool:
    return cache.k.dtype == torch.float8_e4m3fn


def check_scales(what: str, given: LayerCache, shape: tuple[int, ...]) -> None:
    """Check for fp32 scales of float8 K and V."""
    for name, scale in (("k_scale", given.k_scale), ("v_scale", given.v_scale)):
        check_tensor(f"{name} of {what}", scale, shape, torch.float32)


def check_rows_of(cache: LayerCache, k: Tensor, v: Tensor) -> None:
    """Check that k, v are fresh rows with the heads of the pool."""
    check_heads("k", k)
    check_heads("v", v)
    check(v.shape == k.shape, f"k is {list(k.shape)}, v is {list(v.shape)}")
    rows, held = list(k.shape[1:]), list(cache.k.shape[2:])
    check(rows == held, f"rows of {rows}, slots of {held}")


@once
def check_attention(q: Tensor, cache: LayerCache, params: AttentionParams) -> None:
    check_heads("q", q)
    check_cache(cache)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.k.shape[2]
    check(head_dim == cache.k.shape[3], f"q has head_dim {head_dim}, the pool {cache.k.shape[3]}")
    check(head_dim in HEAD_DIMS, f"head_dim {head_dim}", "known: multiples of 8 from 16 to 256, and 512")
    check(num_heads % num_kv_heads == 0, f"{num_heads} heads are not a multiple of {num_kv_heads} KV heads")
    check(num_heads // num_kv_heads <= 128, f"{num_heads // num_kv_heads} heads share a KV head; at most 128 can")
    check(params.scale > 0, f"scale is {params.scale}, not above 0")
    check(params.sliding_window is None or params.sliding_window > 0, f"sliding window {params.sliding_window}")
    check(params.soft_cap is None or params.soft_cap > 0, f"soft cap {params.soft_cap}")
    check(is_float8(cache) or cache.k.dtype == q.dtype, f"q is {q.dtype}, the pool {cache.k.dtype}")
    if params.sinks is not None:
        check_tensor("sinks", params.sinks, (num_heads,), torch.float32)
    check_device(q, *tensors_of(cache), params.sinks)


@once
def check_sequences(q: Tensor, block_table: Tensor, kv_lens: Tensor) -> None:
    num_seqs = kv_lens.shape[0]
    good = block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.shape[0] == num_seqs
    check(good and block_table.stride(1) == 1, "block_table is [num_seqs, max_blocks] int32")
    check_tensor("kv_lens", kv_lens, (num_seqs,), torch.int32)
    check_device(q, block_table, kv_lens)


@once
def check_rows(q: Tensor, positions: Tensor, cu_rows: Tensor, num_seqs: int) -> None:
    check_tensor("positions", positions, q.shape[:1], torch.int64)
    check_tensor("cu_rows", cu_rows, (num_seqs + 1,), torch.int32)
    check_device(q, positions, cu_rows)


def check_rope(cos: Tensor, sin: Tensor, num_rows: int, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (num_rows, head_dim), torch.float32)


def pool_bits(pool: Tensor) -> Tensor:
    """View a pool or stored codes for the kernels: float8 as bytes, since not every architecture converts it."""
    return pool.view(torch.uint8) if pool.dtype == FLOAT8 else pool
