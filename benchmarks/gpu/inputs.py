"""Random inputs for the kernel measurements and checks, made on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cacheblend_kernels import AttentionMetadata, LayerCache
from torch import Tensor

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class AttentionInputs:
    """q [num_rows, num_heads, head_dim], the layer's pool, and the attention metadata."""

    q: Tensor
    cache: LayerCache
    meta: AttentionMetadata

    def to_float8(self, k_scale: Tensor, v_scale: Tensor) -> AttentionInputs:
        """The pools as float8_e4m3fn, divided by scales [num_kv_heads] fp32."""
        k, v = (
            (cache.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            for cache, scale in ((self.cache.k, k_scale), (self.cache.v, v_scale))
        )
        return replace(self, cache=LayerCache(k, v, k_scale, v_scale))


def attention_inputs(
    positions: list[Tensor],
    kv_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = BLOCK_SIZE,
    contiguous: bool = False,
    seed: int = 0,
) -> AttentionInputs:
    """Return inputs for rows at these positions. positions: per sequence, sorted, on the CPU. Pool slots without a key
    are NaN."""
    gen = torch.Generator(device).manual_seed(seed)
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + 1  # block 0 is unused and pads the tables
    order = torch.arange(1, num_blocks)
    if not contiguous:
        order = order[torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))]
    table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
    size, kind = (num_blocks, block_size, num_kv_heads, head_dim), {"device": device, "dtype": dtype, "generator": gen}
    pools = [torch.randn(size, **kind) for _ in range(2)]
    taken = 0
    for seq, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
        blocks = order[taken : taken + count]
        table[seq, :count] = blocks.int()
        taken += count
        for pool in pools:
            pool[int(blocks[-1]), n - (count - 1) * block_size :] = torch.nan
    for pool in pools:
        pool[0] = torch.nan
    flat = torch.cat(positions)
    q = torch.randn(len(flat), num_heads, head_dim, **kind)
    cu_rows = torch.tensor([0, *(len(rows) for rows in positions)]).cumsum(0).int()
    meta = AttentionMetadata(
        positions=flat.to(device),
        cu_rows=cu_rows.to(device),
        block_table=table.to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        contiguous_slots=tuple(int(row[0]) * block_size if contiguous else -1 for row in table),
        max_kv_len=max(kv_lens),
    )
    return AttentionInputs(q, LayerCache(*pools), meta)


def scattered_positions(length: int, num_rows: int, *, run: int = 1, seed: int = 0) -> Tensor:
    """Return num_rows sorted distinct positions below length, in runs of `run` where they fit; int64, CPU."""
    gen = torch.Generator().manual_seed(seed)
    starts = torch.randperm(length // run, generator=gen)[: -(-num_rows // run)] * run
    return (starts[:, None] + torch.arange(run)).flatten().sort().values[:num_rows]


def prefill_inputs(shape: Shape, kind: str, length: int, suffix: int, device: torch.device) -> AttentionInputs:
    """Return a prompt of `length` tokens whose last `suffix` are fresh. kind: full, full paged (blocks as in a busy
    pool), scattered P% (of the rows before the suffix, and the suffix), suffix."""
    word, _, share = kind.partition(" ")
    last = torch.arange(length - suffix, length)
    if word == "full":
        positions = torch.arange(length)
    elif word == "suffix":
        positions = last
    else:
        chosen = round((length - suffix) * float(share.rstrip("%")) / 100)
        positions = torch.cat((scattered_positions(length - suffix, chosen), last))
    return attention_inputs([positions], [length], *shape.heads, device, contiguous=kind == "full")


def decode_inputs(shape: Shape, batch: int, length: int, device: torch.device, seed: int = 0) -> AttentionInputs:
    """Return one row per sequence at the last of `length` positions, in scattered blocks."""
    last = [torch.tensor([length - 1])] * batch
    return attention_inputs(last, [length] * batch, *shape.heads, device, seed=seed)


def rope_tables(num_rows: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos, sin [num_rows, head_dim] fp32 of the positions 0..num_rows-1."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device).double() / head_dim)
    angles = (torch.arange(num_rows, device=device)[:, None] * frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()
