"""Which of the reusable, inexact tokens to recompute. A policy is a class of a few lines that scores tokens.

To add one: write the class, name it in SELECTORS and make_selector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError


@dataclass(frozen=True)
class Candidates:
    """The reusable, inexact tokens still in question.

    positions: [n] int64, sorted; chunk: [n] int64, which chunk of the prompt; offset: [n] int64, place in its chunk.
    """

    positions: Tensor
    chunk: Tensor
    offset: Tensor

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def take(self, keep: Tensor) -> Candidates:
        return Candidates(self.positions[keep], self.chunk[keep], self.offset[keep])


class Selector(Protocol):
    """`needs_check_layer`: the scores compare fresh with old KV, so tokens are chosen at the check layer, else before layer 0."""

    needs_check_layer: bool

    def scores(self, candidates: Candidates, deviation: Callable[[], Tensor]) -> Tensor:
        """[n] fp32, higher is recomputed first. `deviation()` is the KV deviation [n] at the check layer."""
        ...


class HighestDeviation:
    """`hkvd`: the tokens whose fresh KV differs most from the old (CacheBlend, arXiv 2405.16444, section 4.3)."""

    needs_check_layer = True

    def scores(self, candidates: Candidates, deviation: Callable[[], Tensor]) -> Tensor:
        return deviation()


class FirstOfChunk:
    """`first`: the first tokens of each chunk (EPIC's LegoLink, arXiv 2410.15332)."""

    needs_check_layer = False

    def scores(self, candidates: Candidates, deviation: Callable[[], Tensor]) -> Tensor:
        return -candidates.offset.float()


class RandomTokens:
    """`random`: the baseline every policy has to beat."""

    needs_check_layer = False

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def scores(self, candidates: Candidates, deviation: Callable[[], Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(candidates), generator=generator).to(candidates.positions.device)


SELECTORS = ("hkvd", "first", "random", "all", "none")


def make_selector(name: str, seed: int = 0) -> Selector:
    """The selector of that name; `all` and `none` are ratios 1 and 0 of any. Raises UsageError."""
    if name == "hkvd":
        return HighestDeviation()
    if name in ("first", "all", "none"):
        return FirstOfChunk()
    if name == "random":
        return RandomTokens(seed)
    raise UsageError(f"unknown selector {name!r}", f"known: {', '.join(SELECTORS)}")


def choose(scores: Tensor, count: int, candidates: Candidates, block: int = 1) -> Tensor:
    """Indexes [<= count] of the tokens to recompute, sorted.

    block > 1 averages the scores over runs of `block` tokens of a chunk and takes whole runs: a token recomputed
    among stale neighbours is repaired worse than a run (arXiv 2609.17983). Ties go to the earlier token.
    """
    count = min(count, scores.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    if block > 1:
        run = candidates.chunk * (int(candidates.offset.max()) // block + 1) + candidates.offset // block
        _, run = torch.unique(run, return_inverse=True)
        total = torch.zeros(int(run.max()) + 1, device=scores.device).index_add_(0, run, scores.float())
        size = torch.bincount(run).clamp_min(1)
        scores = (total / size)[run]
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values


def budget(ratio: float, num_candidates: int) -> int:
    """How many tokens a ratio is worth: rounded up, so that any ratio above 0 repairs something."""
    return min(num_candidates, math.ceil(ratio * num_candidates - 1e-9))
