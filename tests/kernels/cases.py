"""Attention cases over a poisoned pool, and fp64 references that share no code with any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cacheblend_kernels import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.configs import LaunchPlan, TileConfig
from torch import Tensor

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class AttentionCase:
    """Rows of one or more sequences over a pool that holds NaN wherever no key of theirs lies."""

    q: Tensor
    cache: LayerCache
    meta: AttentionMetadata

    def to(self, device: torch.device) -> AttentionCase:
        return AttentionCase(self.q.to(device), moved(self.cache, device), moved(self.meta, device))

    def in_float8(self, k_scale: Tensor, v_scale: Tensor) -> AttentionCase:
        """The pool as float8_e4m3fn codes with these scales [num_kv_heads] fp32."""
        pools = ((self.cache.k, k_scale), (self.cache.v, v_scale))
        k, v = ((p.float() / scale[:, None]).to(torch.float8_e4m3fn) for p, scale in pools)
        return replace(self, cache=LayerCache(k, v, k_scale, v_scale))


def moved(given: Any, device: torch.device) -> Any:
    """A dataclass of tensors and other values with its tensors on the device."""
    tensors = {name: t.to(device) for name, t in vars(given).items() if isinstance(t, Tensor)}
    return replace(given, **tensors)


def attention_case(
    positions: list[list[int]],
    kv_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    contiguous: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> AttentionCase:
    """positions: of the rows of each sequence. strided: q is a slice of a wider tensor, as a fused projection gives."""
    gen = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + 2  # block 0 belongs to nobody and pads the tables
    order = torch.arange(1, num_blocks) if contiguous else torch.randperm(num_blocks - 1, generator=gen) + 1
    table = torch.zeros(len(kv_lens), max(counts) + 1, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    taken = 0
    for seq, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
        table[seq, :count] = order[taken : taken + count].int()
        taken += count
        slots = slots_of(table[seq], n, block_size)
        for cache in (k_cache, v_cache):
            cache.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(n, num_kv_heads, head_dim, generator=gen)
    flat = torch.tensor([p for rows in positions for p in rows], dtype=torch.int64)
    q = torch.randn(len(flat), num_heads + (num_heads if strided else 0), head_dim, generator=gen)
    cu_rows = torch.tensor([0, *(len(rows) for rows in positions)]).cumsum(0).int()
    meta = AttentionMetadata(
        positions=flat,
        cu_rows=cu_rows,
        block_table=table,
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        contiguous_slots=tuple(int(row[0]) * block_size if contiguous else -1 for row in table),
        max_kv_len=max(kv_lens),
    )
    return AttentionCase(q.to(dtype)[:, :num_heads], LayerCache(k_cache.to(dtype), v_cache.to(dtype)), meta)


def slots_of(table_row: Tensor, kv_len: int, block_size: int) -> Tensor:
    positions = torch.arange(kv_len)
    return table_row.long()[positions // block_size] * block_size + positions % block_size


def attention_reference(
    case: AttentionCase,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row by row, key by key, in fp64: the definition written out. Returns fp64 on the CPU."""
    q, meta, cache = case.q.cpu().double(), case.meta, case.cache
    positions, cu_rows = meta.positions.tolist(), meta.cu_rows.tolist()
    block_size, num_kv_heads = cache.k.shape[1:3]
    k_slots, v_slots = (held(*p) for p in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)))
    out = torch.empty_like(q)
    for seq, kv_len in enumerate(meta.kv_lens.tolist()):
        slots = slots_of(meta.block_table[seq].cpu(), kv_len, block_size)
        group = q.shape[1] // num_kv_heads
        k, v = (s[slots].repeat_interleave(group, 1) for s in (k_slots, v_slots))
        for row in range(cu_rows[seq], cu_rows[seq + 1]):
            last = positions[row] + 1
            first = 0 if sliding_window is None else max(0, last - sliding_window)
            logits = torch.einsum("hd,nhd->hn", q[row], k[first:last]) * scale
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            if sinks is not None:
                logits = torch.cat((logits, sinks.double()[:, None]), -1)
            out[row] = torch.einsum("hn,nhd->hd", torch.softmax(logits, -1)[:, : last - first], v[first:last])
    return out


def held(pool: Tensor, scale: Tensor | None = None) -> Tensor:
    """What the slots of a pool hold, fp64 [num_slots, num_kv_heads, head_dim] on the CPU."""
    values = pool.cpu().float().double().view(-1, *pool.shape[2:])
    return values if scale is None else values * scale.cpu().double()[:, None]


def rope_tables(num_rows: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """cos, sin [num_rows, head_dim] fp32 at scattered positions."""
    positions = torch.randint(0, 5000, (num_rows,), generator=torch.Generator().manual_seed(seed)).double()
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def scattered(num: int, below: int, seed: int = 0) -> list[int]:
    """num sorted distinct positions in 0..below-1, the last one included."""
    order = torch.randperm(below - 1, generator=torch.Generator().manual_seed(seed))[: num - 1]
    return sorted([*order.tolist(), below - 1])


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """got against the fp64 reference, at what `dtype` can hold."""
    assert not got.isnan().any(), "NaN leaked into the result"
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


SMALL = TileConfig(16, 16, 4, 2)
_OF_LAYER = ("sliding_window", "soft_cap", "sinks")


def run_attention(
    kernel: Callable[..., Tensor], case: AttentionCase, device: torch.device, **options: object
) -> Tensor:
    """Run a Triton kernel. options: fields of AttentionParams and LaunchPlan."""
    moved_case, scale = case.to(device), case.q.shape[-1] ** -0.5
    given = {name: options.pop(name, None) for name in _OF_LAYER}
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    params = AttentionParams(scale, **given)  # type: ignore[arg-type]
    plan = LaunchPlan(90, 132, **{"config": SMALL, **options})  # type: ignore[arg-type]
    return kernel(moved_case.q, moved_case.cache, moved_case.meta, params, plan)


def check_attention(
    kernel: Callable[..., Tensor], case: AttentionCase, device: torch.device, **options: object
) -> None:
    """Compare a Triton kernel with the fp64 reference."""
    of_layer = (options.get(name) for name in _OF_LAYER)
    want = attention_reference(case, case.q.shape[-1] ** -0.5, *of_layer)  # type: ignore[arg-type]
    assert_close(run_attention(kernel, case, device, **options), want, case.q.dtype)
