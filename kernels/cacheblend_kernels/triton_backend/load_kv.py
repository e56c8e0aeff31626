"""Load stored K and V into the pool in one kernel, for several chunks and layers: dequantise, rotate K to its new
positions, cast, scatter.

`StoredKV` describes the stored formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import (
    PLANES,
    STORED,
    LayerCache,
    Slots,
    StagedChunk,
    StagedTensor,
    StoredKV,
    StoredLayers,
    bits_of,
    packed_bytes,
)
from cacheblend_kernels.triton_backend.cache_ops import rotate, to_pool
from cacheblend_kernels.triton_backend.checks import (
    FLOAT8,
    FLOATS,
    check,
    check_cache,
    check_device,
    check_rope,
    check_tensor,
    device_guard,
    once,
    pool_bits,
    tensors_of,
)
from cacheblend_kernels.triton_backend.configs import padded
from cacheblend_kernels.triton_backend.float8 import e4m3_to_fp32

BLOCK_HEADS = 8
ALIGNMENT = 64  # bytes, of a chunk's tensors and layers in a buffer
Form = tuple[tuple[str, tuple[torch.dtype, tuple[int, ...]]], ...]
"""Name, dtype and shape without rows of each of a chunk's tensors."""


@triton.jit
def _plane(ptr, at, channels, mask, HEAD_DIM: tl.constexpr, PLANE: tl.constexpr):
    """Return the channels' codes, int32, in a plane of PLANE bits; `at`: the plane's first byte of each head."""
    NUM_BYTES: tl.constexpr = (HEAD_DIM * PLANE + 7) // 8
    found = tl.load(ptr + at[:, None] + (channels % NUM_BYTES)[None, :], mask=mask, other=0).to(tl.int32)
    return (found >> (channels // NUM_BYTES * PLANE)[None, :]) & ((1 << PLANE) - 1)


@triton.jit
def _blocks_mixed(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Hadamard transform, without its factor, of each BLOCK = 2^STAGES values in x. A stage adds and subtracts
    neighbours and moves the lowest bit of their index to the top, so that after all stages every value is where it
    was."""
    rows = tl.reshape(x, [ROWS, BLOCK])
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(rows, [ROWS, BLOCK // 2, 2]))
        rows = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, BLOCK])
    return tl.reshape(rows, x.shape)


@triton.jit
def _of_codes(
    ptr, scale_ptr, levels_ptr, row, heads, own, channels, mask,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, STORED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return one half of the heads' channels: levels of their codes times the scale, mixed within their blocks."""
    LOW: tl.constexpr = BITS & 4
    LOW_BYTES: tl.constexpr = (HEAD_DIM * LOW + 7) // 8
    MID: tl.constexpr = BITS & 2
    MID_BYTES: tl.constexpr = (HEAD_DIM * MID + 7) // 8
    HIGH: tl.constexpr = BITS & 1
    HIGH_BYTES: tl.constexpr = (HEAD_DIM * HIGH + 7) // 8
    at = (row * STORED_HEADS + heads) * (LOW_BYTES + MID_BYTES + HIGH_BYTES)
    code = tl.zeros([heads.shape[0], channels.shape[0]], dtype=tl.int32)
    if LOW > 0:
        code = _plane(ptr, at, channels, mask, HEAD_DIM, LOW)
    if MID > 0:
        code += _plane(ptr, at + LOW_BYTES, channels, mask, HEAD_DIM, MID) << LOW
    if HIGH > 0:
        code += _plane(ptr, at + LOW_BYTES + MID_BYTES, channels, mask, HEAD_DIM, HIGH) << (LOW + MID)
    scale = tl.load(scale_ptr + row * STORED_HEADS + heads, mask=own, other=0.0).to(tl.float32)
    value = tl.load(levels_ptr + code, mask=mask, other=0.0) * scale[:, None]
    return _blocks_mixed(value, value.shape[0] * value.shape[1] // BLOCK, BLOCK, STAGES)


@triton.jit
def _halves(
    ptr, scale_ptr, levels_ptr, row, heads, own, halves, mask, factor, CODEC: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, STORED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return both halves of the heads' channels of one stored row, fp32 [BLOCK_HEADS, BLOCK_HALF], without a mean."""
    high = halves + HEAD_DIM // 2
    if CODEC == "codes":
        a = _of_codes(
            ptr, scale_ptr, levels_ptr, row, heads, own, halves, mask, BITS, BLOCK, STAGES, STORED_HEADS, HEAD_DIM
        )
        b = _of_codes(
            ptr, scale_ptr, levels_ptr, row, heads, own, high, mask, BITS, BLOCK, STAGES, STORED_HEADS, HEAD_DIM
        )
        return (a + b) * factor, (a - b) * factor
    a = _decoded(ptr, scale_ptr, row, heads, own, halves, mask, CODEC, STORED_HEADS, HEAD_DIM)
    return a, _decoded(ptr, scale_ptr, row, heads, own, high, mask, CODEC, STORED_HEADS, HEAD_DIM)


@triton.jit
def _decoded(
    ptr, scale_ptr, row, heads, own, channels, mask,
    CODEC: tl.constexpr, STORED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return the heads' channels of one row stored as plain values, fp32 [BLOCK_HEADS, BLOCK_HALF]."""
    at = row * (STORED_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + channels[None, :]
    value = tl.load(ptr + at, mask=mask, other=0)
    if CODEC != "plain":
        value = e4m3_to_fp32(value)
        value *= tl.load(scale_ptr + heads, mask=own, other=0.0)[:, None]
    return value.to(tl.float32)


@triton.jit
def _of_chunk(ptr, entry_ptr, layer, COLUMN: tl.constexpr):
    """Return the address of a chunk's tensor at a layer. ptr: the buffer; entry_ptr: the chunk's row of
    `layers_table`, in which COLUMN holds the tensor's first byte."""
    num_bytes: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    start = tl.multiple_of(tl.load(entry_ptr + COLUMN) + layer * tl.load(entry_ptr + 6), 64)
    return ptr + tl.multiple_of(start // num_bytes, 16)


@triton.jit(
    do_not_specialize=["first_slot", "layer_slots", "first_head"],
    do_not_specialize_on_alignment=["slots_ptr", "row_chunks_ptr", "places_ptr"],
)
def load_kv_kernel(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_mean_ptr,
    k_levels_ptr,
    v_levels_ptr,
    row_chunks_ptr,
    places_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    pool_k_scale_ptr,
    pool_v_scale_ptr,
    first_slot,
    layer_slots,
    first_head,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    STORED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CODEC: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_HEADS heads of one row at one layer. Grid (num_rows, parts, num_layers).

    With places_ptr (`layers_table`) all stored tensors lie in one buffer, whose address all their pointers hold;
    row_chunks_ptr has each row's chunk. Without it the pointers are those of one chunk at one layer. The pools of the
    layers lie layer_slots slots apart, their scales a multiple of four heads. slots_ptr None: the slots are first_slot,
    first_slot + 1, ... Other pointers are None if the format of the stored values or of the pool does not need them.
    CODEC "codes" has K_BITS and V_BITS per value, mixed in blocks of BLOCK = 2^STAGES channels in each half of a head.
    factor: makes mixing its own inverse.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HEAD_DIM // 2
    own = heads < NUM_KV_HEADS
    mask = own[:, None] & in_half[None, :]
    slot = first_slot + row if slots_ptr is None else tl.load(slots_ptr + row)
    at = (layer * layer_slots + slot) * (NUM_KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + halves[None, :]
    cos = tl.load(cos_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + halves, mask=in_half, other=0.0)[None, :]
    k_factor = 1.0
    v_factor = 1.0
    if pool_k_scale_ptr is not None:
        pool_heads = layer * ((NUM_KV_HEADS + 3) // 4 * 4) + heads
        k_factor = 1.0 / tl.load(pool_k_scale_ptr + pool_heads, mask=own, other=1.0)[:, None]
        v_factor = 1.0 / tl.load(pool_v_scale_ptr + pool_heads, mask=own, other=1.0)[:, None]

    stored_row = row
    if places_ptr is not None:
        entry_ptr = places_ptr + tl.load(row_chunks_ptr + row) * 7
        stored_row = row - tl.load(entry_ptr)
        k_ptr = _of_chunk(k_ptr, entry_ptr, layer, 1)
        v_ptr = _of_chunk(v_ptr, entry_ptr, layer, 2)
        if CODEC != "plain":
            k_scale_ptr = _of_chunk(k_scale_ptr, entry_ptr, layer, 3)
            v_scale_ptr = _of_chunk(v_scale_ptr, entry_ptr, layer, 4)
        if CODEC == "codes":
            k_mean_ptr = _of_chunk(k_mean_ptr, entry_ptr, layer, 5)
    stored_heads = first_head + heads
    k1, k2 = _halves(
        k_ptr, k_scale_ptr, k_levels_ptr, stored_row, stored_heads, own, halves, mask, factor,
        CODEC, K_BITS, BLOCK, STAGES, STORED_HEADS, HEAD_DIM,
    )  # fmt: skip
    v1, v2 = _halves(
        v_ptr, v_scale_ptr, v_levels_ptr, stored_row, stored_heads, own, halves, mask, factor,
        CODEC, V_BITS, BLOCK, STAGES, STORED_HEADS, HEAD_DIM,
    )  # fmt: skip
    if CODEC == "codes":
        mean_at = k_mean_ptr + stored_heads[:, None] * HEAD_DIM + halves[None, :]
        k1 += tl.load(mean_at, mask=mask, other=0.0).to(tl.float32)
        k2 += tl.load(mean_at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    k1, k2 = rotate(k1, k2, cos, sin)
    tl.store(k_cache_ptr + at, to_pool(k1 * k_factor, k_cache_ptr), mask=mask)
    tl.store(k_cache_ptr + at + HEAD_DIM // 2, to_pool(k2 * k_factor, k_cache_ptr), mask=mask)
    tl.store(v_cache_ptr + at, to_pool(v1 * v_factor, v_cache_ptr), mask=mask)
    tl.store(v_cache_ptr + at + HEAD_DIM // 2, to_pool(v2 * v_factor, v_cache_ptr), mask=mask)


class _Source(NamedTuple):
    """Stored rows as the kernel takes them."""

    tensors: tuple[Tensor | None, ...]  # by `STORED`; of a buffer, the buffer in the dtype of each
    levels: tuple[Tensor | None, Tensor | None]
    codec: str  # plain, fp8 or codes
    num_heads: int
    first_head: int = 0
    row_chunks: Tensor | None = None
    table: Tensor | None = None


def load_kv(stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
    """`KernelBackend.load_kv`."""
    k, levels = stored.k, (stored.k_levels, stored.v_levels)
    where = _where(slots, len(k), cache)
    _check(stored, cache, slots.cos, slots.sin, where)
    tensors = pool_bits(k), pool_bits(stored.v), stored.k_scale, stored.v_scale, stored.k_mean
    _launch(_Source(tensors, levels, _codec(k.dtype), k.shape[1]), len(k), [cache], 0, slots, where)


def load_layers(stored: StoredLayers, caches: Sequence[LayerCache], slots: Slots) -> bool:
    """`KernelBackend.load_layers` in one launch. Returns False, and launches nothing, if the layers' pools are not
    evenly spaced."""
    cache, layer_slots, num_rows = caches[0], _layer_slots(caches), len(stored.row_chunks)
    if layer_slots is None or num_rows == 0:
        return num_rows == 0
    where, form = _where(slots, num_rows, cache), _form_of(stored, len(caches))
    levels, chunks_of = (stored.k_levels, stored.v_levels), (stored.row_chunks, stored.table)
    given, rotation = (stored.data, *chunks_of, *levels), (slots.cos, slots.sin, where)
    _check_layers(form, len(stored.chunks), stored.first_head, cache, given, rotation)
    of_name = {name: _viewed(stored.data, dtype) for name, (dtype, _) in form}
    (dtype, (num_heads, _)), tensors = form[0][1], tuple(of_name.get(name) for name in STORED)
    source = _Source(tensors, levels, _codec(dtype), num_heads, stored.first_head, *chunks_of)
    _launch(source, num_rows, caches, layer_slots, slots, where)
    return True


def _launch(
    source: _Source, num_rows: int, caches: Sequence[LayerCache], layer_slots: int, slots: Slots, where: Tensor | None
) -> None:
    """layer_slots: from a layer's pool to the next one's; where: slots that are not consecutive."""
    if num_rows == 0:
        return
    cache, last, num_layers = caches[0], caches[-1], len(caches)
    scales = (cache.k_scale, last.k_scale), (cache.v_scale, last.v_scale)
    num_kv_heads, head_dim = cache.k.shape[2:]
    block = mixed_block(head_dim) if source.codec == "codes" else 1
    k_bits, v_bits = bits_of(source.levels)
    with device_guard(cache.k):
        load_kv_kernel[(num_rows, -(-num_kv_heads // BLOCK_HEADS), num_layers)](
            *source.tensors,
            *source.levels,
            source.row_chunks,
            source.table,
            where,
            slots.cos,
            slots.sin,
            pool_bits(_through(cache.k, last.k)),
            pool_bits(_through(cache.v, last.v)),
            *(None if a is None or b is None else _through(a, b) for a, b in scales),
            slots.first_slot,
            layer_slots,
            source.first_head,
            (2 * block) ** -0.5,
            NUM_KV_HEADS=num_kv_heads,
            STORED_HEADS=source.num_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=padded(head_dim // 2),
            BLOCK_HEADS=BLOCK_HEADS,
            CODEC=source.codec,
            K_BITS=k_bits,
            V_BITS=v_bits,
            BLOCK=block,
            STAGES=block.bit_length() - 1,
            num_warps=4,
        )


def _where(slots: Slots, num_rows: int, cache: LayerCache) -> Tensor | None:
    """Return the slot mapping, None if the slots are consecutive and thus not read."""
    if slots.first_slot < 0:
        return slots.slots
    check(slots.first_slot + num_rows <= cache.k.shape[0] * cache.k.shape[1], "the slots run past the pool")
    return None


def _layer_slots(caches: Sequence[LayerCache]) -> int | None:
    """Return the slots from a layer's pool to the next layer's; None unless the layers are evenly spaced in one
    allocation."""
    first = caches[0]
    check(all(c.k.shape == first.k.shape and c.k.dtype == first.k.dtype for c in caches), "the layers' pools differ")
    steps = _steps([c.k for c in caches]) | _steps([c.v for c in caches])
    of_scales = _steps([c.k_scale for c in caches]) | _steps([c.v_scale for c in caches])
    num_kv_heads, head_dim = first.k.shape[2:]
    step, of_slot = max(steps, default=0), num_kv_heads * head_dim
    even = len(steps) < 2 and (step or len(caches) == 1) and step % of_slot == 0
    return step // of_slot if even and of_scales <= {-(-num_kv_heads // 4) * 4} else None


def _steps(tensors: Sequence[Tensor | None]) -> set[int]:
    """Return the distances from each tensor to the next one, in elements; 0 between allocations."""
    places = [(t.data_ptr(), t.storage_offset() * t.itemsize, t.itemsize) for t in tensors if t is not None]
    return {(b[1] - a[1]) // a[2] if b[0] - a[0] == b[1] - a[1] else 0 for a, b in pairwise(places)}


def _through(first: Tensor, last: Tensor) -> Tensor:
    """Return a view from the first of evenly spaced tensors to the end of the last one, flat."""
    if first is last:
        return first
    return first.as_strided((last.storage_offset() - first.storage_offset() + last.numel(),), (1,))


def _viewed(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data if dtype.itemsize == 1 else data.view(dtype)


def _codec(dtype: torch.dtype) -> str:
    """Return the format of stored K and V of this dtype: plain, fp8 or codes (see `StoredKV`)."""
    return {torch.uint8: "codes", FLOAT8: "fp8"}.get(dtype, "plain")


def mixed_block(head_dim: int) -> int:
    """Return the channels of half a head that are mixed together: the largest power of two dividing the half."""
    half = head_dim // 2
    return half & -half


class _Staged(NamedTuple):
    """A chunk in a buffer, checked."""

    form: Form
    num_rows: int
    end: int  # byte after its first layer
    layer_bytes: int


def _form_of(stored: StoredLayers, num_layers: int) -> Form:
    """Return the form of all chunks, after checking that they have the same one and lie in the buffer."""
    chunks = [chunk.__dict__.get("_staged") or _staged(chunk) for chunk in stored.chunks]
    forms, num_rows, _, _ = zip(*chunks, strict=True)
    end = max(c.end + (num_layers - 1) * c.layer_bytes for c in chunks)
    check(end <= len(stored.data), "the chunks run past the buffer")
    check(sum(num_rows) == len(stored.row_chunks), f"{sum(num_rows)} rows of chunks, {len(stored.row_chunks)} rows")
    check(forms.count(forms[0]) == len(forms), "the chunks differ in format")
    form: Form = forms[0]
    return form


def _staged(chunk: StagedChunk) -> _Staged:
    starts = (*(t.start for t in chunk.tensors.values()), chunk.layer_bytes)
    check(not any(start % ALIGNMENT for start in starts), f"tensors start at {starts}, not multiples of {ALIGNMENT}")
    end = max(t.end for t in chunk.tensors.values())
    found = _Staged(_only(_form(chunk.tensors)), chunk.num_rows, end, chunk.layer_bytes)
    chunk.__dict__["_staged"] = found
    return found


@cache
def _only(form: Form) -> Form:
    """Return one object for equal forms, which compares quickly."""
    return form


def _form(tensors: Mapping[str, Tensor | StagedTensor]) -> Form:
    """Return the form of a chunk's tensors, k first, after checking their rows."""
    k = tensors["k"]
    of_chunk = ("k_mean", "k_scale", "v_scale") if k.dtype == FLOAT8 else ("k_mean",)
    for name, t in tensors.items():
        rows = 1 if name in of_chunk else k.shape[0]
        check(len(t.shape) == 1 or t.shape[0] == rows, f"{name} is {list(t.shape)}, k {list(k.shape)}")
    return tuple((name, (t.dtype, tuple(t.shape[len(t.shape) > 1 :]))) for name, t in tensors.items())


def _check_form(form: Form, num_heads: int, head_dim: int, levels: tuple[Tensor | None, Tensor | None]) -> None:
    """Check the form against the format that the dtype of k names."""
    found, bits, of_heads = dict(form), bits_of(levels), (num_heads,)
    dtype, wanted = found["k"][0], dict[str, tuple[torch.dtype, tuple[int, ...]]]()
    if dtype == torch.uint8:
        check(bits[0] in PLANES and bits[1] in PLANES, f"codes need k_levels and v_levels, of {list(PLANES)} bits")
        for name, table, n in zip("kv", levels, bits, strict=True):
            check_tensor(f"{name}_levels", table, (2**n,), torch.float32)
            wanted[name] = dtype, (num_heads, packed_bytes(head_dim, n))
            wanted[f"{name}_scale"] = torch.bfloat16, of_heads
        wanted["k_mean"] = torch.bfloat16, (num_heads, head_dim)
    else:
        check(dtype in (*FLOATS, FLOAT8), f"k is {dtype}", f"known: {', '.join(map(str, (*FLOATS, FLOAT8)))}, codes")
        check(bits == (0, 0), "levels are for codes")
        for name in "kv":
            wanted[name] = dtype, (num_heads, head_dim)
            if dtype == FLOAT8:
                wanted[f"{name}_scale"] = torch.float32, of_heads
    for name in STORED:
        needed, got = wanted.get(name), found.get(name)
        check(needed == got, f"{name} of {dtype}, codes of {bits} bits: {needed} is needed, got {got}")


@once
def _check(stored: StoredKV, cache: LayerCache, cos: Tensor, sin: Tensor, slots: Tensor | None) -> None:
    """Check the inputs. slots: None if they are consecutive and thus not read."""
    tensors = {name: t for name in STORED if (t := getattr(stored, name)) is not None}
    check(all(t.is_contiguous() for t in tensors.values()), "stored tensors are not contiguous")
    num_kv_heads, head_dim = cache.k.shape[2:]
    _check_form(_form(tensors), num_kv_heads, head_dim, (stored.k_levels, stored.v_levels))
    _check_target(cache, stored.k.shape[0], cos, sin, slots)
    check_device(*tensors_of(stored), *tensors_of(cache), cos, sin, slots)


@once
def _check_layers(
    form: Form,
    num_chunks: int,
    first_head: int,
    cache: LayerCache,
    stored: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    where: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Check the inputs, see `_check`. stored: data, row_chunks, table and levels of `StoredLayers`; where: cos, sin and
    slots."""
    data, row_chunks, table, *levels = stored
    check_tensor("data", data, (len(data) // ALIGNMENT * ALIGNMENT,), torch.uint8)
    check_tensor("row_chunks", row_chunks, (len(row_chunks),), torch.int32)
    check_tensor("table", table, (num_chunks, 7), torch.int64)
    (num_heads, *_), (num_kv_heads, head_dim) = form[0][1][1], cache.k.shape[2:]
    check(first_head + num_kv_heads <= num_heads, f"heads from {first_head} on: {num_heads} are stored")
    _check_form(form, num_heads, head_dim, (levels[0], levels[1]))
    _check_target(cache, len(row_chunks), *where)
    check_device(*stored, *tensors_of(cache), *where)


def _check_target(cache: LayerCache, num_rows: int, cos: Tensor, sin: Tensor, slots: Tensor | None) -> None:
    check_cache(cache)
    check_rope(cos, sin, num_rows, cache.k.shape[3])
    if slots is not None:
        check_tensor("slots", slots, (num_rows,), torch.int64)
