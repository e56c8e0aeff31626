"""Selectors choose which of the reusable, inexact tokens to recompute. Each is a small class that scores tokens.

types/blend.py names them. Other distributions install more (docs/extending.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_cli import extensions
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.rows import bucket
from cacheblend_cli.types.blend import SELECTORS, parse_selector

LEAST_CHUNKS_BUCKET = 8
"""Chunks in the smallest bucket of prompts whose corrections share graphs."""


@dataclass(frozen=True)
class Candidates:
    """Reusable, inexact tokens that may be recomputed."""

    positions: Tensor  # [n] int64, sorted
    chunk: Tensor  # [n] int64, index of the prompt's chunk
    offset: Tensor  # [n] int64, position in the chunk
    sizes: tuple[int, ...] = ()  # of the chunks, () if not known on the host

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each chunk. Waits for the device if `sizes` is not set."""
        return self.sizes or tuple(torch.unique_consecutive(self.chunk, return_counts=True)[1].tolist())

    @cached_property
    def starts(self) -> Tensor:
        """First token of each chunk, [num_chunks + 1] int32, ending in the number of tokens. Chunks without tokens
        follow, so that prompts with about as many chunks share graphs."""
        starts = [0, *accumulate(self.lengths)]
        missing = bucket(len(starts) - 1, LEAST_CHUNKS_BUCKET) + 1 - len(starts)
        return upload([*starts, *starts[-1:] * missing], self.positions.device, torch.int32)

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def take(self, keep: Tensor) -> Candidates:
        return Candidates(self.positions[keep], self.chunk[keep], self.offset[keep])


class Evidence(Protocol):
    """Inputs of selectors, computed on demand; each is [n] fp32 over the candidates."""

    def deviation(self, candidates: Candidates) -> Tensor: ...
    def attention(self, candidates: Candidates) -> Tensor: ...


class Selector(ABC):
    # True: compares fresh with old KV, so tokens are chosen at the check layer; False: before layer 0
    needs_check_layer = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        """Return scores [n] fp32, not negative; the highest are recomputed first."""


class HighestDeviation(Selector):
    """`hkvd`: tokens whose fresh KV differs most from the old (CacheBlend, arXiv 2405.16444, section 4.3)."""

    needs_check_layer = True

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        return evidence.deviation(candidates)


class FirstOfChunk(Selector):
    """`first`: the first tokens of each chunk (EPIC's LegoLink, arXiv 2410.15332)."""

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        return 1 / (1 + candidates.offset.float())


class QueryAttention(Selector):
    """`query`: tokens the question attends to (ProphetKV, arXiv 2602.02579; FusionRAG, arXiv 2601.12904)."""

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        return evidence.attention(candidates)


class RandomTokens(Selector):
    """`random`: random tokens, a baseline."""

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return upload(torch.rand(len(candidates), generator=generator), candidates.positions.device, torch.float32)


class Combined(Selector):
    """`first:4+query`: the best `count` tokens of every chunk by each of `parts`, then the rest of the budget by
    `last`."""

    def __init__(self, parts: Sequence[tuple[Selector, int]], last: Selector) -> None:
        self.parts, self.last = parts, last
        self.needs_check_layer = any(s.needs_check_layer for s in (*(s for s, _ in parts), last))

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        return self.last.scores(candidates, evidence)

    def required(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        """Return the tokens chosen by the parts, [n] bool."""
        wanted = torch.zeros(len(candidates), dtype=torch.bool, device=candidates.positions.device)
        for selector, count in self.parts:
            wanted |= _rank_in_chunk(selector.scores(candidates, evidence), candidates) < count
        return wanted


def make_selector(text: str, seed: int = 0) -> Selector:
    """Return a selector, or a combination such as `first:4+query`. Raises UsageError."""
    parts, last = parse_selector(text)
    selector = _selector(last, seed)
    return Combined([(_selector(part, seed), count) for part, count in parts], selector) if parts else selector


def _selector(name: str, seed: int) -> Selector:
    make = SELECTORS[name] if name in SELECTORS else extensions.load("selector", name)
    made: Selector = (globals()[make] if isinstance(make, str) else make)(seed)
    return made


def choose(
    scores: Tensor,
    count: int,
    candidates: Candidates,
    *,
    block: int = 1,
    required: Tensor | None = None,
) -> Tensor:
    """Return the indexes [<= count] of the tokens with the highest scores, sorted. Ties go to the earlier token.

    block > 1 averages the scores over runs of `block` tokens of a chunk and takes whole runs, truncating the last one
    to `count`: a token recomputed among stale neighbours is repaired worse than a run (arXiv 2609.17983). required: [n]
    bool, tokens to take first.
    """
    count = min(count, scores.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    if block > 1:
        place = torch.stack((candidates.chunk, candidates.offset // block))
        begins = (place[:, 1:] != place[:, :-1]).any(0)
        run = torch.cat((begins.new_zeros(1), begins)).cumsum(0)
        total, size = torch.zeros(2, len(run), device=scores.device)
        total.index_add_(0, run, scores.float())
        size.index_add_(0, run, torch.ones_like(total))
        scores = (total / size.clamp_min(1))[run]
    order = torch.argsort(scores, descending=True, stable=True)
    if required is not None:
        order = order[torch.argsort(required[order].int(), descending=True, stable=True)]
    return order[:count].sort().values


def budget(ratio: float, num_candidates: int) -> int:
    """Return the number of tokens for a ratio, rounded up, so that any ratio above 0 repairs something."""
    return min(num_candidates, math.ceil(ratio * num_candidates - 1e-9))


def _rank_in_chunk(scores: Tensor, candidates: Candidates) -> Tensor:
    """Return [n] int64: number of tokens of the same chunk with a higher score."""
    order = torch.argsort(scores, descending=True, stable=True)
    by_chunk = order[torch.argsort(candidates.chunk[order], stable=True)]
    chunk = candidates.chunk[by_chunk]
    place = torch.arange(len(candidates), device=scores.device)
    start = torch.searchsorted(chunk, chunk)  # index of each chunk's first token
    rank = torch.empty_like(place)
    rank[by_chunk] = place - start
    return rank
