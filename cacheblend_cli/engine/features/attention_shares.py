"""Share of an answer's attention that each chunk of the prompt received while decoding."""

from __future__ import annotations

from dataclasses import replace

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
    return request, AttentionShares(request.plan)


class AttentionShares(Hook):
    """Sums the attention of an answer's tokens, one in EVERY. Costs 1 % of decoding with a model of 135 M
    parameters."""

    def __init__(self, plan: PromptPlan) -> None:
        self._plan = plan
        self._found: dict[int, Tensor] = {}  # by answer, fp32 [num_tokens]

    def watches(self, index: int, num_tokens: int) -> bool:
        return num_tokens % EVERY == 0

    def on_attention(self, index: int, weights: Tensor) -> None:
        weights = weights[: self._plan.num_tokens]
        self._found[index] = self._found[index] + weights if index in self._found else weights

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        """Report each chunk's share of the attention to all chunks; none before the first step."""
        if index not in self._found or not self._plan.chunks:
            return
        looks = torch.stack([self._found[index][chunk.start : chunk.end].sum() for chunk in self._plan.chunks]).tolist()
        if (total := sum(looks)) > 0:
            uses = zip(answer.chunks, looks, strict=True)
            answer.chunks = [replace(chunk, attention=round(look / total, 4)) for chunk, look in uses]
