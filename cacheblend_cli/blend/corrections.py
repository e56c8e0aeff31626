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


class Regression:
    """Moves the old K and V of a token by what the changes of the recomputed tokens say of its own: Gaussian process
    regression, a layer at a time, of K before RoPE and V together.

    Two tokens are taken to change alike where they are of one chunk (what all of a chunk misses is the mean shift), more so
    the nearer they stand, and, of whatever chunk, where their old K and V are alike. Where recomputed tokens disagree,
    or nothing is known of a chunk, little is moved.

    A token is moved by what later tokens of its own chunk say too, never by a later chunk: causal by chunk, not by token.
    """

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        self._pool, self._rows = prompt.pool, prompt.rows(every.positions)
        self._repaired = torch.searchsorted(every.positions, repaired.positions)
        self._stale = torch.ones(len(every), dtype=torch.bool, device=every.positions.device)
        self._stale[self._repaired] = False
        same = (every.chunk[:, None] == repaired.chunk).float()
        apart = (every.offset[:, None] - repaired.offset).abs()
        near = sum(NEAR * torch.exp(-apart / length) for length in LENGTHS)
        self._placed, self._shared = same * (CHUNK + near), (1 + same) / 2
        chunks, sizes = torch.unique_consecutive(every.chunk, return_counts=True)
        known = torch.searchsorted(repaired.chunk, chunks, right=True)  # recomputed tokens up to the end of each chunk
        ends = sizes.cumsum(0)
        self._parts = list(zip((ends - sizes).tolist(), ends.tolist(), known.tolist(), strict=True))

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Move the layer's stale rows. k before RoPE, v: fresh, of the repaired tokens, which the pool still has old;
        [num_repaired, num_kv_heads, head_dim]."""
        rows, index, repaired, stale = self._rows, layer.index, self._repaired, self._stale
        old_k, old_v = self._pool.read(index, rows.slots)
        cos, sin = rows.cos_sin(layer)
        stretch = cos.square() + sin.square()  # the square of RoPE's attention factor (yarn, longrope), else 1
        plain_k = layer.kernels.rope(old_k, cos / stretch, -sin / stretch)
        alike = torch.exp(-(self._distance(plain_k) + self._distance(old_v)) / 2)
        change = torch.cat((k.float() - plain_k[repaired], v.float() - old_v[repaired]), -1)
        moved = self._predict(self._placed + self._shared * alike, change.flatten(1)).view(
            len(old_k), *change.shape[1:]
        )
        moved_k, moved_v = moved.chunk(2, -1)
        moved_k = layer.kernels.rope(moved_k, cos, sin)
        self._pool.write(index, rows.slots[stale], (old_k + moved_k)[stale], (old_v + moved_v)[stale])

    def _distance(self, old: Tensor) -> Tensor:
        """fp32 [num_tokens, num_repaired]: squared, in units of the mean squared distance from the mean of the first chunk,
        which no later chunk changes."""
        x = old.flatten(1).float()
        first = x[self._parts[0][0] : self._parts[0][1]]
        unit = (first - first.mean(0)).square().sum(1).mean().clamp_min(1e-30)
        return torch.cdist(x, x[self._repaired]).square() / unit

    def _predict(self, alike: Tensor, change: Tensor) -> Tensor:
        """alike: fp32 [num_tokens, num_repaired], of every token with the recomputed ones; change: fp32 [num_repaired, n].
        The expected change of every token, from the recomputed ones of its chunk and of those before."""
        noisy = alike[self._repaired] + NOISE * torch.eye(len(change), device=change.device)
        root = torch.linalg.cholesky(noisy)  # its leading blocks are the roots of the leading blocks
        parts = [
            alike[start:end, :known] @ torch.cholesky_solve(change[:known], root[:known, :known])
            for start, end, known in self._parts
        ]
        return torch.cat(parts)


CHUNK, NEAR, LENGTHS, NOISE = 2.0, 0.3, (8.0, 30.0), 0.5
"""How much two tokens' changes are alike: of one chunk, near each other (falling with these lengths, tokens), against 1 for
the same old K and V; and what of a change is a token's own. Fitted to what is left unexplained, see docs/fidelity.md."""
