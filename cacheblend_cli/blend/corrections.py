"""Corrections of the KV that is not recomputed, from the KV that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import DecoderLayer


class Correction(Protocol):
    """Made when the tokens to recompute are chosen; applied at every layer after that."""

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None: ...


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
    """Moves the old K and V of a token by what the changes of its chunk's recomputed tokens say of its own: Gaussian process
    regression, a chunk and layer at a time, of K before RoPE and V together.

    All tokens of a chunk are taken to change alike (what all of it misses is the mean shift), more so the nearer they stand,
    and where their old K and V are alike. Where recomputed tokens disagree, less is moved; where there are none, nothing.

    A token is moved by what later tokens of its own chunk say too, never by another chunk: causal by chunk, not by token.
    """

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        self._pool = prompt.pool
        chunks, counts = torch.unique_consecutive(repaired.chunk, return_counts=True)
        ends = counts.cumsum(0).tolist()
        parts = zip(chunks.tolist(), [0, *ends], ends, strict=False)
        self._parts = [_Part.of(prompt, every.take(every.chunk == c), repaired, slice(a, b)) for c, a, b in parts]

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Move the layer's stale rows. k before RoPE, v: fresh, of the repaired tokens, which the pool still has old;
        [num_repaired, num_kv_heads, head_dim]."""
        for part in self._parts:
            rows, known, stale = part.rows, part.known, part.stale
            old_k, old_v = self._pool.read(layer.index, rows.slots)
            cos, sin = rows.cos_sin(layer)
            stretch = cos.square() + sin.square()  # the square of RoPE's attention factor (yarn, longrope), else 1
            plain_k = layer.kernels.rope(old_k, cos / stretch, -sin / stretch)
            alike = part.placed + torch.exp(-(_distance(plain_k, known) + _distance(old_v, known)) / 2)
            change = torch.cat((k[part.own].float() - plain_k[known], v[part.own].float() - old_v[known]), -1)
            root = torch.linalg.cholesky_ex(alike[known] + NOISE * torch.eye(len(known), device=k.device)).L
            moved = alike @ torch.cholesky_solve(change.flatten(1), root)
            moved_k, moved_v = moved.view(len(old_k), *change.shape[1:]).chunk(2, -1)
            moved_k = layer.kernels.rope(moved_k.contiguous(), cos, sin)
            self._pool.write(layer.index, rows.slots[stale], (old_k + moved_k)[stale], (old_v + moved_v)[stale])


@dataclass(frozen=True)
class _Part:
    """A chunk that has recomputed tokens. own: which of all the recomputed ones they are; known: [m] int64, where they stand
    among the chunk's n tokens; stale: [n] bool, the others; placed: fp32 [n, m], how alike their places make them."""

    rows: Rows
    own: slice
    known: Tensor
    stale: Tensor
    placed: Tensor

    @classmethod
    def of(cls, prompt: Prompt, chunk: Candidates, repaired: Candidates, own: slice) -> _Part:
        known = torch.searchsorted(chunk.positions, repaired.positions[own])
        stale = torch.ones(len(chunk), dtype=torch.bool, device=known.device)
        stale[known] = False
        apart = (chunk.offset[:, None] - chunk.offset[known]).abs()
        near = torch.stack([torch.exp(-apart / length) for length in LENGTHS]).sum(0)
        return cls(prompt.rows(chunk.positions), own, known, stale, CHUNK + NEAR * near)


def _distance(old: Tensor, known: Tensor) -> Tensor:
    """fp32 [n, m]: squared, of each row from the known ones, in units of the rows' mean squared distance from their mean."""
    x = old.flatten(1).float()
    unit = (x - x.mean(0)).square().sum(1).mean().clamp_min(1e-30)
    return torch.cdist(x, x[known]).square() / unit


CHUNK, NEAR, LENGTHS, NOISE = 2.0, 0.3, (8.0, 30.0), 0.5
"""How much two tokens' changes are alike: of one chunk, near each other (falling with these lengths, tokens), against 1 for
the same old K and V; and what of a change is a token's own. What is left unexplained hardly changes with twice or half of any."""

CorrectionKind = Callable[[Prompt, Candidates, Candidates], Correction]
CORRECTIONS: dict[str, CorrectionKind] = {"regression": Regression, "mean-shift": MeanShift}
