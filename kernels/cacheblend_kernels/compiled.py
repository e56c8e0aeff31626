"""cpu.c through ctypes: what a CPU computes between the products of a step, in one pass each.

Built when the package is installed, if there is a C compiler. Each function returns None for anything the compiled code
does not support (not built, another dtype, a width that is not a multiple of 16). torch's operations then compute the
same, up to the order of sums and the last bits of e^x; `rope_and_cache` is equal to the bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import time
from functools import cache
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from cacheblend_kernels.interface import (
    AttentionMetadata,
    AttentionParams,
    KernelError,
    LayerCache,
    Slots,
    StoredKV,
    packed_bytes,
)
from cacheblend_kernels.row_table import RowTable

ABI, LANES, CHUNK, MAX_DIM, MULTIPLE, MAX_CODES = 10, 16, 256, 256, 32, 1024  # as in cpu/*.h
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALONE = 1 << 15  # elements; below this a second thread costs more than it saves

# Limits of torch and oneDNN hold for compiled code, too.
VNNI = os.environ.get("ATEN_CPU_CAPABILITY") != "avx2"
_ISA = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
_MATRICES = "AMX" in _ISA or _ISA in ("ALL", "DEFAULT")
_BFLOAT16 = _MATRICES or _ISA in ("AVX512_CORE_BF16", "AVX512_CORE_FP16")

_INTEGERS, _INTEGERS_BY_VNNI = 3, 4  # ways of prefill_product
_GAIN = 1.4  # least gain of products in bf16 without AMX: there is rounding, and less than this may be noise

# The structures of cpu/*.h, with their trailing padding. Packing takes less time than ctypes.Structure, especially with
# cold caches.
_NORM, _GATE = Struct("4P2qf3i0P").pack, Struct("2P2q2i0P").pack
_PREFILL_PRODUCT = Struct("5P3qf4i0P").pack
_ATTENTION, _ROPE, _CODES = Struct("7P9qf2i0P").pack, Struct("9P8q2i0P").pack, Struct("12P6q4i0P").pack
_PREFILL, _DECODE = Struct("7P11q2f2i0P").pack, Struct("5P3qf4i0P").pack
_RESTORING = Struct("4P3q2i0P").pack
_GUARD = Struct("3Pq2i0P").pack


@cache
def library() -> Any:
    """Return the compiled code for this CPU's vector width, which runs without the GIL; None if it does not load."""
    narrow = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return loaded("_cpu_avx2" if narrow else "_cpu")


def loaded(name: str) -> Any:
    """Return the compiled module of this name; None if it was not built or does not load."""
    found = importlib.util.find_spec(f"cacheblend_kernels.{name}")
    if found is None or found.origin is None:
        return None
    try:
        code = ctypes.CDLL(found.origin)
        if ctypes.c_int32.in_dll(code, "cb_abi").value != ABI:
            return None
        for function in (
            "rms_norm",
            "silu_and_mul",
            "prefill_product",
            "decode_attention",
            "prefill_attention",
            "float_attention",
            "rope_and_cache",
            "load_codes",
            "decode_product",
            "restore_rows",
            "guard_mapping",
        ):
            getattr(code, f"cb_{function}").argtypes = [ctypes.c_char_p]
    except (OSError, AttributeError, ValueError):  # built for another machine, or another version
        return None
    return code


def guard_mapping(address: int, size: int, message: bytes, exit_code: int) -> int | None:
    """End the process with the message on stderr and this exit code, instead of by SIGBUS, when a mapped file is found
    shorter or unreadable on access. Returns the guard's number for `unguard_mapping`; None without compiled code or
    with too many guards. A SIGBUS elsewhere goes to the handler installed before the first guard."""
    code, text = library(), ctypes.create_string_buffer(message, len(message))
    if code is None:
        return None
    number: int = code.cb_guard_mapping(_GUARD(address, size, ctypes.addressof(text), len(message), exit_code, 0))
    return None if number < 0 else number


def unguard_mapping(number: int) -> None:
    """Remove a guard. To be called before the memory is unmapped."""
    if (code := library()) is not None:
        code.cb_unguard_mapping(number)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | None:
    """RMSNorm of x, or of residual + x; the sum is stored in residual. x, residual: [..., dim] of one dtype; weight:
    [dim] of the same dtype, or fp32."""
    code, dtype, shape, of_weight = library(), x.dtype, x.shape, weight.dtype
    kind, dim = _TYPES.get(dtype), shape[-1]
    if code is None or kind is None or dim % LANES or not x.is_cpu or of_weight not in (dtype, torch.float32):
        return None
    if weight.shape != (dim,) or not weight.is_cpu:
        return None
    added_to = 0
    if residual is not None:
        if residual.dtype != dtype or residual.shape != shape or not residual.is_contiguous():
            return None
        added_to = residual.data_ptr()
    x, weight = x.contiguous(), weight.contiguous()
    out, num_values = torch.empty_like(x), x.numel()
    addresses = x.data_ptr(), added_to, weight.data_ptr(), out.data_ptr()
    code.cb_rms_norm(
        _NORM(*addresses, num_values // dim, dim, eps, kind, int(of_weight == torch.bfloat16), _threads(num_values))
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor | None:
    """Return silu(gate) * up, both rounded to the dtype. gate_up: [num_rows, 2 * dim]."""
    code, kind, shape = library(), _TYPES.get(gate_up.dtype), gate_up.shape
    if code is None or kind is None or len(shape) != 2 or shape[1] % (2 * LANES) or not gate_up.is_cpu:
        return None
    if not gate_up.is_contiguous():
        return None
    num_rows, width = shape
    out = gate_up.new_empty(num_rows, width // 2)
    addresses = gate_up.data_ptr(), out.data_ptr()
    code.cb_silu_and_mul(_GATE(*addresses, num_rows, width // 2, kind, _threads(num_rows * width // 2)))
    return out


def prefill_product(
    x: Tensor, table: RowTable, bias: Tensor | None = None, way: int | None = None, *, gated: bool = False
) -> Tensor | None:
    """factor * x W^T + bias for many rows, with the weights in the types of their file; gated: `silu_and_mul` of it. A
    row's result depends neither on other rows nor on the number of threads.

    x: [num_rows, width], fp32 or bf16; bias: [num_outputs] of x's dtype. way: to multiply (see cpu/prefill_floats.h),
    None for the best of this CPU. Weights are rounded to bf16 if products are; with integers, rows are rounded to 15
    bits, with a scale for 128 values, where weights are in blocks.
    """
    code, kind, (num_rows, width) = library(), _TYPES.get(x.dtype), x.shape
    if code is None or kind is None or width != table.width or width % MULTIPLE or not x.is_cpu:
        return None
    num_outputs = len(table)
    if gated and num_outputs % (2 * LANES):
        return None
    x, way = x.contiguous(), _best_way(x.dtype) if way is None else way
    out = x.new_empty(num_rows, num_outputs // (2 if gated else 1))
    addresses = x.data_ptr(), table.addresses.data_ptr(), table.kinds.data_ptr(), 0 if bias is None else bias.data_ptr()
    sizes = num_rows, width, num_outputs, table.factor, kind, torch.get_num_threads(), way, gated
    return None if way < 0 or code.cb_prefill_product(_PREFILL_PRODUCT(*addresses, out.data_ptr(), *sizes)) else out


@cache
def _best_way(dtype: torch.dtype) -> int:
    """Return the fastest way to multiply that computes here what floats do; -1 if there is none. Tried with a matrix of
    plain numbers: of integers only the instructions' presence is known."""
    numbers = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=numbers).to(dtype) for n in (40, 20))
    right = x.float() @ weight.float().T
    for way in _ways(dtype):
        found = prefill_product(x, RowTable.of(weight), way=way)
        if found is not None and torch.allclose(found.float(), right, rtol=0.02, atol=0.02):
            return way
    return -1


def _ways(dtype: torch.dtype) -> tuple[int, ...]:
    if dtype == torch.bfloat16:
        return *((2,) if _MATRICES else ()), *((1,) if _BFLOAT16 else ()), 0
    return (_INTEGERS_BY_VNNI, _INTEGERS, 0) if VNNI else (_INTEGERS, 0)


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether products with tables of rows are available for x of this dtype."""
    return library() is not None and dtype in _TYPES and _best_way(dtype) >= 0


def has_bfloat16() -> bool:
    """Return whether a prefill in bf16 is faster on this CPU: with AMX, and with AVX512-BF16 where products take less
    time than in fp32. They take half the time on some CPUs, and more on others."""
    way = _best_way(torch.bfloat16) if library() is not None else -1
    return way == 2 or (way == 1 and _gain_of_bfloat16() >= _GAIN)


@cache
def _gain_of_bfloat16() -> float:
    """Return how many times as fast products in bf16 are, by the best of five turns of about a millisecond."""
    best = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    for _ in range(5):
        for dtype in best:
            weight, x = torch.ones(768, 512, dtype=dtype), torch.ones(128, 512, dtype=dtype)
            start = time.perf_counter()
            prefill_product(x, RowTable.of(weight), way=int(dtype == torch.bfloat16))
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return best[torch.float32] / best[torch.bfloat16]


def decode_attention(q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams) -> Tensor | None:
    """`KernelBackend.decode_attention` over pools of q's dtype, in one pass over K and V in place (a softmax in chunks
    of keys: FlashDecoding). A row's result depends neither on other rows nor on the number of threads."""
    code, dtype, pool, where = library(), q.dtype, cache.addresses, meta.addresses
    kind, (num_rows, num_heads, dim) = _TYPES.get(dtype), q.shape
    if code is None or kind is None or pool is None or where is None or dim % LANES or dim > MAX_DIM:
        return None
    if params.soft_cap is not None or params.sinks is not None:
        return None
    _, block_size, num_kv_heads, pool_dim = cache.k.shape
    num_seqs, max_blocks = meta.block_table.shape
    if cache.k.dtype != dtype or pool_dim != dim or num_heads % num_kv_heads or not q.is_cpu or num_rows < num_seqs:
        return None
    max_keys = max_blocks * block_size
    if meta.max_kv_len > max_keys:
        return None
    q = q.contiguous()
    out, chunks = torch.empty_like(q), -(-(meta.max_kv_len or max_keys) // CHUNK)
    addresses = q.data_ptr(), *pool, *where, out.data_ptr(), 0
    shape = num_rows, num_seqs, num_heads, num_kv_heads, dim, block_size, max_blocks, chunks, params.sliding_window or 0
    failed = code.cb_decode_attention(_ATTENTION(*addresses, *shape, params.scale, kind, torch.get_num_threads()))
    return None if failed else out


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, params: AttentionParams, *, matrices: bool | None = None
) -> Tensor | None:
    """`torch_attention.prefill_attention` in fp32, or in bf16 on a CPU with AVX512-BF16. A row's result depends neither
    on other rows nor on threads.

    matrices: multiply bf16 with AMX; None for wherever the CPU has it.
    """
    code, (num_rows, num_heads, dim), (num_keys, num_kv_heads, v_dim) = library(), q.shape, v.shape
    in_floats = q.dtype == torch.float32
    if code is None or q.dtype not in _TYPES or any(size % (8 if in_floats else 32) for size in (dim, v_dim)):
        return None
    if not all(x.is_cpu and x.dtype == q.dtype for x in (q, k, v)) or num_heads % num_kv_heads:
        return None
    if not in_floats and not _BFLOAT16:
        return None
    if any(x.stride()[1:] != (x.shape[2], 1) for x in (q, k, v)):
        return None
    matrices = not in_floats and _has_matrices() if matrices is None else matrices
    positions, sinks = positions.contiguous(), None if params.sinks is None else params.sinks.float().contiguous()
    out, num_keys = q.new_empty(num_rows, num_heads, v_dim), min(num_keys, int(positions[-1]) + 1)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), positions.data_ptr(), 0 if sinks is None else sinks.data_ptr()
    shape = num_rows, num_heads, num_kv_heads, dim, v_dim, num_keys, q.stride(0), k.stride(0), v.stride(0)
    numbers = params.sliding_window or 0, 0, params.scale, params.soft_cap or 0.0
    sizes = *shape, *numbers, torch.get_num_threads(), int(matrices)
    attention = code.cb_float_attention if in_floats else code.cb_prefill_attention
    return None if attention(_PREFILL(*addresses, out.data_ptr(), 0, *sizes)) else out


@cache
def _has_matrices() -> bool:
    """Return whether AMX computes here what AVX512-BF16 does, by trying it."""
    if not _MATRICES:
        return False
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(100, n, 64, generator=numbers).to(torch.bfloat16) for n in (4, 2, 2))
    given = q, k, v, torch.arange(100), AttentionParams(0.125)
    pairs, matrices = (prefill_attention(*given, matrices=way) for way in (False, True))
    return pairs is not None and matrices is not None and torch.allclose(pairs, matrices, rtol=0.02, atol=0.02)


def rope_and_cache(
    q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots
) -> tuple[Tensor | None] | None:
    """`KernelBackend.rope_and_cache` into pools of K's dtype. Returns the rotated q in a tuple."""
    code, dtype, shape, pool, where = library(), k.dtype, k.shape, cache.addresses, slots.addresses
    kind, (num_rows, num_kv_heads, dim), of_pool = _TYPES.get(dtype), shape, cache.k.shape
    if code is None or kind is None or pool is None or where is None or dim % 2 or not k.is_cpu:
        return None
    if v.shape != shape or not v.dtype == cache.k.dtype == dtype or of_pool[2:] != shape[1:]:
        return None
    if slots.cos.shape != (num_rows, dim):
        return None
    (k_stride, *k_rest), (v_stride, *v_rest) = k.stride(), v.stride()
    if k_rest != [dim, 1] or v_rest != k_rest:
        return None
    out, from_to, num_heads, q_stride = None, (0, 0), 0, 0
    if q is not None:
        q_stride, *q_rest = q.stride()
        num_heads = q.shape[1]
        if q.dtype != dtype or q.shape != (num_rows, num_heads, dim) or q_rest != k_rest:
            return None
        out = torch.empty(q.shape, dtype=dtype)
        from_to = q.data_ptr(), out.data_ptr()
    addresses = from_to[0], k.data_ptr(), v.data_ptr(), where[1], where[2], where[0], from_to[1], *pool
    counts = num_rows, num_heads, num_kv_heads, dim, q_stride, k_stride, v_stride, of_pool[0] * of_pool[1]
    threads = _threads(num_rows * (num_heads + 2 * num_kv_heads) * dim)
    if code.cb_rope_and_cache(_ROPE(*addresses, *counts, kind, threads)):
        raise KernelError("rows go to slots that the pool does not have", "slots are below num_blocks * block_size")
    return (out,)


def load_codes(stored: StoredKV, cache: LayerCache, slots: Slots) -> bool:
    """`KernelBackend.load_kv` of codes (see `StoredKV`) into pools in fp32 or bf16, in one pass: unpack, levels,
    inverse Hadamard, mean, RoPE, write. Returns False for anything the compiled code does not support."""
    code, (k_bits, v_bits), k, v, mean = library(), stored.bits, stored.k, stored.v, stored.k_mean
    k_scale, v_scale, k_levels, v_levels = stored.k_scale, stored.v_scale, stored.k_levels, stored.v_levels
    if code is None or k_scale is None or v_scale is None or mean is None or k_levels is None or v_levels is None:
        return False
    where, of_k, of_v = slots.addresses, cache.k.shape, cache.v.shape
    kind, (num_rows, num_kv_heads), (k_dim, v_dim) = _TYPES.get(cache.k.dtype), k.shape[:2], (of_k[3], of_v[3])
    if kind is None or where is None or cache.v.dtype != cache.k.dtype or k_dim % 2 or max(k_dim, v_dim) > MAX_CODES:
        return False
    wanted = (
        (k, torch.uint8, (num_rows, num_kv_heads, packed_bytes(k_dim, k_bits))),
        (v, torch.uint8, (num_rows, num_kv_heads, packed_bytes(v_dim, v_bits))),
        (k_scale, torch.bfloat16, (num_rows, num_kv_heads)),
        (v_scale, torch.bfloat16, (num_rows, num_kv_heads)),
        (mean, torch.bfloat16, (1, num_kv_heads, k_dim)),
        (k_levels, torch.float32, (1 << k_bits,)),
        (v_levels, torch.float32, (1 << v_bits,)),
        (cache.k, cache.k.dtype, (*of_v[:2], num_kv_heads, k_dim)),
        (cache.v, cache.k.dtype, (*of_k[:2], num_kv_heads, v_dim)),
        (slots.cos, torch.float32, (num_rows, k_dim)),
    )
    if not all(t.is_cpu and t.dtype == d and t.shape == shape and t.is_contiguous() for t, d, shape in wanted):
        return False
    addresses = (x.data_ptr() for x in (k, v, k_scale, v_scale, mean, k_levels, v_levels))
    counts = num_rows, num_kv_heads, k_dim, v_dim, of_k[0] * of_k[1], slots.first_slot
    threads = _threads(num_rows * num_kv_heads * (k_dim + v_dim))
    pools = cache.k.data_ptr(), cache.v.data_ptr()
    failed = code.cb_load_codes(
        _CODES(*addresses, where[1], where[2], where[0], *pools, *counts, k_bits, v_bits, kind, threads)
    )
    if failed == 1:
        raise KernelError("rows go to slots that the pool does not have", "slots are below num_blocks * block_size")
    return not failed


def decode_product(x: Tensor, table: RowTable, bias: Tensor | None = None, *, vnni: bool = VNNI) -> Tensor | None:
    """factor * x W^T + bias for a few rows, with the weights where they are stored. Also None for a kind that is not in
    BLOCKS. Rows are rounded to 15 bits, with a scale for 32 values, for weights in blocks; not for F32, F16 and BF16. A
    row's result depends neither on other rows nor on the number of threads.

    x: [num_rows, width], fp32 or bf16; bias: [num_outputs], fp32 or bf16. vnni: whether to use these instructions
    where the CPU has them.
    """
    code, kind, of_x, num_outputs = library(), _TYPES.get(x.dtype), x.shape, len(table.kinds)
    if code is None or kind is None or not x.is_cpu or len(of_x) != 2 or of_x[1] != table.width:
        return None
    at_bias, of_bias = 0, 0
    if bias is not None:
        if bias.dtype not in _TYPES or bias.shape != (num_outputs,) or not bias.is_contiguous() or not bias.is_cpu:
            return None
        at_bias, of_bias = bias.data_ptr(), _TYPES[bias.dtype]
    x, num_rows = x.contiguous(), of_x[0]
    out = x.new_empty(num_rows, num_outputs)
    addresses = x.data_ptr(), table.addresses.data_ptr(), table.kinds.data_ptr(), at_bias, out.data_ptr()
    sizes, threads = (num_rows, table.width, num_outputs), _threads(table.width * num_outputs)
    numbers = *sizes, table.factor, kind, of_bias, int(vnni), threads
    return None if num_rows and code.cb_decode_product(_DECODE(*addresses, *numbers)) else out


def restore_rows(
    table: RowTable, indices: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor | None:
    """Dequantise rows: [num_indices, width] in fp32, equal to the gguf package's to the bit, or rounded to bf16. Also
    None for a kind that is not in BLOCKS. indices: [num_indices] int64. out: memory of this dtype for the result,
    used if it is large enough."""
    code, kind, count = library(), _TYPES.get(dtype), len(indices)
    if code is None or kind is None or indices.dtype != torch.int64 or not indices.is_cpu:
        return None
    indices, num_values = indices.contiguous(), count * table.width
    if out is None or out.numel() < num_values:
        out = torch.empty(num_values, dtype=dtype)
    out = out.view(-1)[:num_values].view(count, table.width)
    addresses = table.addresses.data_ptr(), table.kinds.data_ptr(), indices.data_ptr(), out.data_ptr()
    failed = code.cb_restore_rows(
        _RESTORING(*addresses, len(table.kinds), count, table.width, kind, _threads(num_values))
    )
    if failed == 2:
        raise KernelError("indices of rows that the table does not have", "indices are below num_outputs")
    return None if failed else out


def _threads(num_values: int) -> int:
    return 1 if num_values <= _ALONE else torch.get_num_threads()
