"""`KernelBackend.load_kv` on a CPU as one compiled pass over the memory (load_kv.c), where the installation has it.

It is built when the package is installed where there is a C compiler; without it, torch's operations do the same in
several passes. For pools of fp32.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cacheblend_kernels.interface import KernelError

_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_CODES8, _CODES4 = 4, 5
_MAX_HEAD_DIM = 1024


class _Stored(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero")]


@cache
def compiled_function() -> Any:
    """The compiled code, None where it was not built or does not load. It runs without the interpreter lock."""
    found = importlib.util.find_spec("cacheblend_kernels._load_kv")
    if found is None or found.origin is None:
        return None
    try:
        function = ctypes.CDLL(found.origin).cacheblend_load_kv_1
    except (OSError, AttributeError):  # built for another machine, or of another version
        return None
    address, count = ctypes.c_void_p, ctypes.c_int64
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_int, ctypes.POINTER(_Stored), count, count, count, count, address, address, address, address, count,
        address, count,
    ]  # fmt: skip
    return function


def load_kv(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    first_slot: int,
    scales: Sequence[Tensor | None],
    group_size: int,
) -> bool:
    """As `KernelBackend.load_kv`; whether it was done: not where the code is missing or the tensors are not what it takes.

    cos, sin: [num_rows, head_dim] fp32, both halves of a row the same. scales: k_scale, k_zero, v_scale, v_zero. Raises
    KernelError for a slot that the pool does not have.
    """
    compiled = compiled_function()
    num_rows, num_heads, stored_dim = k.shape
    num_blocks, block_size, _, head_dim = k_cache.shape
    form = _FORMS.get(k.dtype, -1)
    if k.dtype == torch.uint8:
        form = _CODES8 if stored_dim == head_dim else _CODES4
    if compiled is None or form < 0 or head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return False
    table, pool = (num_rows, head_dim), (num_blocks, block_size, num_heads, head_dim)
    in_store = (num_rows, num_heads, head_dim // 2 if form == _CODES4 else head_dim)
    if not (
        _is_array(k, in_store, k.dtype)
        and _is_array(v, in_store, k.dtype)
        and _is_array(k_cache, pool, torch.float32)
        and _is_array(v_cache, pool, torch.float32)
        and _is_array(cos, table, torch.float32)
        and _is_array(sin, table, torch.float32)
        and (first_slot >= 0 or _is_array(slot_mapping, (num_rows,), torch.int64))
        and _are_scales(scales, form, num_rows, num_heads, head_dim, group_size)
    ):
        return False
    stored = _Stored(k.data_ptr(), v.data_ptr(), *(None if t is None else t.data_ptr() for t in scales))
    failed = compiled(
        form, stored, num_rows, num_heads, head_dim, group_size, cos.data_ptr(), sin.data_ptr(), k_cache.data_ptr(),
        v_cache.data_ptr(), num_blocks * block_size, None if first_slot >= 0 else slot_mapping.data_ptr(), first_slot,
    )  # fmt: skip
    if failed:
        raise KernelError("rows go to slots that the pool does not have", "slots are below num_blocks * block_size")
    return True


def _is_array(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the tensor is an array of that shape and dtype in the memory of the host, packed and aligned."""
    return (
        tensor.shape == shape
        and tensor.dtype == dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.data_ptr() % dtype.itemsize == 0
    )


def _are_scales(
    scales: Sequence[Tensor | None], form: int, num_rows: int, num_heads: int, head_dim: int, group_size: int
) -> bool:
    if form in (_CODES8, _CODES4):
        group, row = (-(-num_rows // group_size), num_heads, head_dim), (num_rows, num_heads, 1)
        shapes: tuple[tuple[int, ...] | None, ...] = (group, group, row, row)
    elif form == _FORMS[torch.float8_e4m3fn]:
        shapes = ((num_heads,), None, (num_heads,), None)
    else:
        return not any(t is not None for t in scales)
    return all(
        t is None if shape is None else t is not None and _is_array(t, shape, torch.float32)
        for t, shape in zip(scales, shapes, strict=True)
    )
