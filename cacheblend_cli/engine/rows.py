"""The rows of one launch: which positions of which sequences are computed, and all a layer needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cacheblend_kernels import AttentionMetadata
from torch import Tensor

from cacheblend_cli.engine.kv_pool import PagedSequence
from cacheblend_cli.model.decoder import Decoder


@dataclass(frozen=True)
class Rows:
    """positions, slots: [num_rows] int64; cos, sin: [num_rows, head_dim] fp32; attention: the kernel's metadata."""

    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionMetadata

    def __len__(self) -> int:
        return int(self.positions.shape[0])


def rows_of(decoder: Decoder, sequence: PagedSequence, positions: Tensor, kv_len: int, rope_len: int) -> Rows:
    """Rows at `positions` (sorted int64) of one sequence that holds kv_len positions. rope_len: length RoPE is told."""
    return packed_rows(decoder, [(sequence, positions, kv_len)], rope_len)


def packed_rows(decoder: Decoder, parts: Sequence[tuple[PagedSequence, Tensor, int]], rope_len: int) -> Rows:
    """Rows of several sequences in one launch; parts: (sequence, its positions, its kv_len)."""
    positions = torch.cat([p for _, p, _ in parts]) if len(parts) > 1 else parts[0][1]
    slots = torch.cat([s.slots(p) for s, p, _ in parts])
    cos, sin = decoder.rope.cos_sin(positions, rope_len)
    counts = torch.tensor([0, *(p.shape[0] for _, p, _ in parts)], dtype=torch.int32)
    width = max(len(s.blocks) for s, _, _ in parts)
    table = torch.zeros(len(parts), width, dtype=torch.int32, device=positions.device)
    for i, (sequence, _, _) in enumerate(parts):
        table[i, : len(sequence.blocks)] = sequence.block_table
    single = parts[0][0] if len(parts) == 1 else None
    meta = AttentionMetadata(
        positions=positions,
        cu_rows=torch.cumsum(counts, 0, dtype=torch.int32).to(positions.device),
        block_table=table,
        kv_lens=torch.tensor([n for _, _, n in parts], dtype=torch.int32, device=positions.device),
        contiguous_slot=single.contiguous_slot if single else -1,
        dense=single is not None and _is_run(positions),
        max_rows=max(int(p.shape[0]) for _, p, _ in parts),
        max_kv_len=max(n for _, _, n in parts),
    )
    return Rows(positions, slots, cos, sin, meta)


def _is_run(positions: Tensor) -> bool:
    n = positions.shape[0]
    return n > 0 and int(positions[-1]) - int(positions[0]) + 1 == n
