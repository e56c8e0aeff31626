"""What the Triton kernels assume of their tensors, checked before a launch. Shapes and strides only: no device sync."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, KernelError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257, 8)
_INTERPRETER = threading.RLock()  # Triton's interpreter keeps its state in globals: one launch at a time


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Launches go to the tensor's device; the interpreter's go one after another."""
    if interpreted():
        return _INTERPRETER
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check(condition: bool, message: str, hint: str | None = None) -> None:
    if not condition:
        raise KernelError(message, hint)


def check_device(*tensors: Tensor | None) -> None:
    """All on one device a Triton kernel can reach."""
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
    """x is [num_rows, heads, head_dim] with packed heads; rows may be strided (a slice of a fused projection)."""
    check(x.dim() == 3, f"{name} is [num_rows, heads, head_dim], got {list(x.shape)}")
    check(x.dtype in dtypes, f"{name} is {x.dtype}", f"known: {', '.join(map(str, dtypes))}")
    packed = x.shape[0] == 0 or (x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]))
    check(packed, f"{name} has strides {x.stride()}: its heads are not packed", "call .contiguous()")


def check_pool(name: str, pool: Tensor) -> None:
    check(pool.dim() == 4, f"{name} is [num_blocks, block_size, num_kv_heads, head_dim], got {list(pool.shape)}")
    check(pool.is_contiguous(), f"{name} is not contiguous")
    check(
        pool.dtype in (*FLOATS, torch.float8_e4m3fn),
        f"{name} is {pool.dtype}",
        "known: float16, bfloat16, float32, float8_e4m3fn",
    )
    size = pool.shape[1]
    check(size > 0 and size & (size - 1) == 0, f"block size {size} is not a power of two")


def check_pool_scales(pool: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, prefix: str = "") -> bool:
    """Whether the pool is float8; then both scales must be there, else neither. prefix: of their names."""
    if pool.dtype != torch.float8_e4m3fn:
        check(k_scale is None and v_scale is None, "pool scales are for a float8 pool")
        return False
    check_head_scales("a float8 pool", pool.shape[2], {f"{prefix}k_scale": k_scale, f"{prefix}v_scale": v_scale})
    return True


def check_head_scales(what: str, num_kv_heads: int, scales: dict[str, Tensor | None]) -> None:
    """A scale a KV head, of float8 codes."""
    for name, s in scales.items():
        good = s is not None and s.dtype == torch.float32 and s.shape == (num_kv_heads,) and s.is_contiguous()
        check(good, f"{what} needs {name} [{num_kv_heads}] float32")


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_heads("q", q)
    check_pool("k_cache", k_cache)
    check_pool("v_cache", v_cache)
    check(k_cache.shape == v_cache.shape, f"K pool {list(k_cache.shape)}, V pool {list(v_cache.shape)}")
    check(k_cache.dtype == v_cache.dtype, f"K pool is {k_cache.dtype}, V pool is {v_cache.dtype}")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    check(head_dim == k_cache.shape[3], f"q has head_dim {head_dim}, the pool {k_cache.shape[3]}")
    check(head_dim in HEAD_DIMS, f"head_dim {head_dim}", "known: multiples of 8 from 16 to 256")
    check(num_heads % num_kv_heads == 0, f"{num_heads} heads are no multiple of {num_kv_heads} KV heads")
    check(num_heads // num_kv_heads <= 128, f"{num_heads // num_kv_heads} heads share a KV head; at most 128 can")
    check(scale > 0, f"scale is {scale}, not above 0")
    check(sliding_window is None or sliding_window > 0, f"sliding window {sliding_window}")
    check(soft_cap is None or soft_cap > 0, f"soft cap {soft_cap}")
    if not check_pool_scales(k_cache, k_scale, v_scale):
        check(k_cache.dtype == q.dtype, f"q is {q.dtype}, the pool {k_cache.dtype}")
    check_device(q, k_cache, v_cache, k_scale, v_scale)


def check_metadata(q: Tensor, meta: AttentionMetadata) -> None:
    check(meta.num_rows == q.shape[0], f"{q.shape[0]} rows, {meta.num_rows} positions")
    check(meta.positions.dtype == torch.int64 and meta.positions.is_contiguous(), "positions are [num_rows] int64")
    check(meta.cu_rows.dtype == torch.int32 and meta.cu_rows.is_contiguous(), "cu_rows is [num_seqs + 1] int32")
    check(meta.cu_rows.shape[0] == meta.num_seqs + 1, f"{meta.num_seqs} sequences, {meta.cu_rows.shape[0]} bounds")
    check_table(meta.block_table, meta.num_seqs)
    check(meta.contiguous_slot < 0 or meta.num_seqs == 1, "contiguous_slot is for one sequence")
    check_device(q, meta.positions, meta.cu_rows, meta.block_table)


def check_table(block_table: Tensor, num_seqs: int) -> None:
    good = block_table.dim() == 2 and block_table.dtype == torch.int32 and block_table.shape[0] == num_seqs
    check(good and block_table.stride(1) == 1, "block_table is [num_seqs, max_blocks] int32")


def check_slots(slot_mapping: Tensor, num_rows: int) -> None:
    good = slot_mapping.dtype == torch.int64 and slot_mapping.shape == (num_rows,) and slot_mapping.is_contiguous()
    check(good, f"slot_mapping is [{num_rows}] int64, got {list(slot_mapping.shape)} {slot_mapping.dtype}")


def check_rope(cos: Tensor, sin: Tensor, num_rows: int, head_dim: int) -> None:
    for name, t in (("cos", cos), ("sin", sin)):
        good = t.shape == (num_rows, head_dim) and t.dtype == torch.float32 and t.is_contiguous()
        check(good, f"{name} is [{num_rows}, {head_dim}] float32, contiguous; got {list(t.shape)} {t.dtype}")


def pool_bits(pool: Tensor) -> Tensor:
    """The pool as the kernels see it: float8 as its bytes, since not every architecture converts it."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
