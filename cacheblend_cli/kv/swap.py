"""KV of a preempted sequence in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.kv.pool import KVPool, upload


def swap_out(pool: KVPool, blocks: Sequence[int]) -> list[Tensor]:
    """Return copies of the blocks on the host: K and V of every layer, each [num_blocks, block_size, num_kv_heads,
    head_dim].

    Copies are queued on the compute stream, so later writes to the blocks come after them.
    """
    index = upload(blocks, pool.device)
    return [to_host(held.index_select(0, index)) for held in pool.raw]


def swap_in(pool: KVPool, blocks: Sequence[int], parts: Sequence[Tensor]) -> None:
    """Write swapped-out KV into the same number of blocks."""
    index = upload(blocks, pool.device)
    for held, part in zip(pool.raw, parts, strict=True):
        held.index_copy_(0, index, part.to(pool.device, non_blocking=True))


def to_host(part: Tensor) -> Tensor:
    """Return a copy on the host: on CUDA queued and in pinned memory; on a CPU the tensor itself."""
    if not part.is_cuda:
        return part.cpu()
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
