"""KV of a sequence in the host's memory, while others have its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload


@dataclass(frozen=True)
class SwappedKV:
    """parts: K and V of every layer, [num_blocks, block_size, num_kv_heads, head_dim] on the host. gone: blocks before these
    that the sequence had given back."""

    parts: list[Tensor]
    gone: int = 0

    @property
    def num_blocks(self) -> int:
        return int(self.parts[0].shape[0])


def swap_out(sequence: PagedSequence) -> SwappedKV:
    """Copy the sequence's blocks to the host and release it. Blocks it shares with others stay theirs.

    Copies are queued on the stream that computes, so what is written to the blocks later comes after them."""
    pool = sequence.pool
    index, gone = upload(sequence.owned, pool.device), sequence.gone
    parts = [to_host(t.index_select(0, index)) for t in pool.raw]
    sequence.release()
    return SwappedKV(parts, gone)


def swap_in(pool: KVPool, swapped: SwappedKV, room: int = 0) -> PagedSequence:
    """A sequence of its own blocks that holds what was swapped out. Raises DeviceError when the pool is too small."""
    own = pool.allocator.allocate(swapped.num_blocks, room=pool.blocks_for(room))
    sequence, index = PagedSequence(pool, [*own[:1] * swapped.gone, *own], swapped.gone), upload(own, pool.device)
    for held, part in zip(pool.raw, swapped.parts, strict=True):
        held.index_copy_(0, index, part.to(pool.device, non_blocking=True))
    return sequence


def to_host(part: Tensor) -> Tensor:
    """A copy, on CUDA queued and in pinned memory; on a CPU the tensor itself."""
    if not part.is_cuda:
        return part.cpu()
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
