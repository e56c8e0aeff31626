"""Corrections of the KV that is not recomputed, from the KV that is."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.model.decoder import DecoderLayer


class MeanShift:
    """Moves the old K and V of a chunk by the mean change of its recomputed tokens (AgentKVShift, arXiv 2607.21604).

    What a chunk misses when it is computed alone is much the same for all of its tokens: who or what it is about. The
    mean is taken a chunk and layer, of K before RoPE and of V, and shrunk towards zero where the changes differ from one
    another more than their mean tells (James-Stein, with one variance for the chunks up to it).

    A token is moved by what later tokens of its own chunk say too, never by a later chunk: causal by chunk, not by token.
    """

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        self._pool = prompt.pool
        where = torch.searchsorted(every.positions, repaired.positions)
        stale = torch.ones(len(every), dtype=torch.bool, device=every.positions.device)
        stale[where] = False
        self._chunk, self._stale_chunk = repaired.chunk, every.chunk[stale]
        self._num_chunks = int(every.chunk.max()) + 1
        self._repaired = prompt.rows(repaired.positions)
        self._stale = prompt.rows(every.positions[stale])

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Move the layer's stale rows. k before RoPE, v: fresh, of the repaired tokens, which the pool still has old;
        [num_repaired, num_kv_heads, head_dim]."""
        repaired, stale, index = self._repaired, self._stale, layer.index
        old_k, old_v = self._pool.read(index, repaired.slots)
        cos, sin = repaired.cos_sin(layer)
        stretch = cos.square() + sin.square()  # the square of RoPE's attention factor (yarn, longrope), else 1
        old_k = layer.kernels.rope(old_k, cos / stretch, -sin / stretch)
        stale_k, stale_v = self._pool.read(index, stale.slots)
        moved = layer.kernels.rope(self._mean(k.float() - old_k), *stale.cos_sin(layer))
        self._pool.write(index, stale.slots, stale_k + moved, stale_v + self._mean(v.float() - old_v))

    def _mean(self, change: Tensor) -> Tensor:
        """change: fp32 [num_repaired, num_kv_heads, head_dim]. The shift of every stale row, fp32."""
        device, chunks = change.device, self._num_chunks
        ones = torch.ones(len(change), device=device)
        count = torch.zeros(chunks, device=device).index_add_(0, self._chunk, ones)
        total = torch.zeros(chunks, *change.shape[1:], device=device).index_add_(0, self._chunk, change)
        mean = total / count.clamp_min(1)[:, None, None]
        apart = (change - mean[self._chunk]).square().sum((1, 2))
        spread = torch.zeros(chunks, device=device).index_add_(0, self._chunk, apart)
        variance = spread.cumsum(0) / (count - 1).clamp_min(0).cumsum(0).clamp_min(1)  # of this chunk and those before
        noise = variance / count.clamp_min(1)
        keep = (1 - noise / mean.square().sum((1, 2)).clamp_min(1e-30)).clamp_min(0)
        return (mean * keep[:, None, None])[self._stale_chunk]
