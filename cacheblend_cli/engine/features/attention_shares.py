"""Share of an answer's attention that each chunk of the prompt received while decoding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import Answer

EVERY = 4
"""One in EVERY decoded tokens is observed, starting with the first."""


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, WatchedAnswers(request.plan)


class WatchedAnswers(Hook):
    """The shares of each answer of a request."""

    def __init__(self, plan: PromptPlan) -> None:
        self._shares = defaultdict[int, AttentionShares](partial(AttentionShares, plan))

    def watches(self, index: int, num_tokens: int) -> bool:
        return num_tokens % EVERY == 0

    def on_attention(self, index: int, weights: Tensor) -> None:
        self._shares[index].add(weights)

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        if (shares := self._shares[index].of_chunks()) is not None:
            uses = zip(answer.chunks, shares, strict=True)
            answer.chunks = [replace(chunk, attention=round(share, 4)) for chunk, share in uses]


class AttentionShares:
    """Sums the attention of an answer's tokens, one in EVERY. Costs 1 % of decoding with a model of 135 M
    parameters."""

    def __init__(self, plan: PromptPlan) -> None:
        self._plan = plan
        self._found: Tensor | None = None

    def add(self, weights: Tensor) -> None:
        """Add the attention of the answer's newest token, [kv_len] fp32."""
        weights = weights[: self._plan.num_tokens]
        self._found = weights if self._found is None else self._found + weights

    def of_chunks(self) -> list[float] | None:
        """Return each chunk's share of the attention to all chunks, in prompt order; None before the first step."""
        if self._found is None or not self._plan.chunks:
            return None
        looks = torch.stack([self._found[chunk.start : chunk.end].sum() for chunk in self._plan.chunks]).tolist()
        total = sum(looks)
        return [look / total for look in looks] if total > 0 else None
