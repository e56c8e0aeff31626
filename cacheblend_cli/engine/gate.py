"""`--max-risk`: as soon as the tokens of an answer are likely enough to be others than a full prefill's, a full prefill goes on.

Tokens are said as they come while the probability that one of them is another stays below the limit. The first that would take
it above is drawn from a full prefill's KV, behind what was said, and so are all that follow: nothing that was said is taken
back, and no more than the limit's share of answers is to be expected to differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cacheblend_cli.engine.answer import Risk
from cacheblend_cli.engine.fidelity import teacher_forced
from cacheblend_cli.engine.generate import Passes
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.request import Request, chunk_of
from cacheblend_cli.engine.risk import RiskFile, RiskFit, signals_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.swap import copy_of


class Gate:
    """Watches over one answer. found: what there is to say of it, so far."""

    def __init__(self, fit: RiskFit, limit: float) -> None:
        self._fit, self.found = fit, Risk(0.0, limit)

    @classmethod
    def of(cls, request: Request) -> Gate | None:
        """None where nothing is asked for, or all of the prompt's KV is exact. Raises UsageError without a fit."""
        if request.blend.max_risk is None or not request.plan.inexact_tokens:
            return None
        fit = RiskFile.of(request.collection, _contexts(request), request.blend).read()
        if fit is None:
            raise UsageError(
                "--max-risk is given, and the risk was never fitted for this model, these chunks' context and this way to blend",
                "fit it on questions with their texts: cacheblend eval QUESTIONS.jsonl --fit-risk, with the same settings",
            )
        return cls(fit, request.blend.max_risk)

    def too_risky(self, logits: Tensor) -> bool:
        """Whether the next token is to be drawn from a full prefill's KV, and not from these [vocab_size], of blended KV. It is
        to be asked once for each token, until it says so."""
        token = float(self._fit.of_tokens(signals_of(logits[None]))[0])
        risk = 1 - (1 - self.found.estimate) * (1 - token)
        above = risk > self.found.limit
        said = self.found.tokens
        self.found = (
            replace(self.found, full_prefill_at=said) if above else replace(self.found, estimate=risk, tokens=said + 1)
        )
        return above


def _contexts(request: Request) -> list[str]:
    """What the chunks that need repair were collected behind."""
    keys = [s.key for s in request.plan.chunks if s.status == "blended" and s.key]
    assert request.store is not None
    return list({chunk.context for key in keys if (chunk := chunk_of(request.store, key)) is not None})


def in_full(runtime: Runtime, done: Prefilled, said_ids: Sequence[int]) -> tuple[PagedSequence, Tensor]:
    """A full prefill of the prompt, and the tokens said so far behind it: a sequence, which the caller releases, and the logits
    after them, fp32 [vocab_size]."""
    full = prefill(runtime, done.request.in_full(), room=len(said_ids) + 1)
    if not said_ids:
        return full.sequence, full.logits
    nothing = 0  # in the place of the token that is not drawn yet
    logits = teacher_forced(runtime.decoder, full.sequence, full.plan.token_ids, [*said_ids, nothing])
    return full.sequence, logits[-1]


def gated(runtime: Runtime, gate: Gate, done: Prefilled) -> Passes:
    """Where a full prefill is to go on, its KV comes into the blocks of `done`, and the next token is drawn from its logits."""

    @torch.inference_mode()
    def passed(logits: Tensor, said_ids: Sequence[int]) -> Tensor:
        if gate.found.full_prefill_at is not None or not gate.too_risky(logits):
            return logits
        start = time.perf_counter()
        sequence, exact = in_full(runtime, done, said_ids)
        try:
            copy_of(sequence, done.sequence, done.plan.num_tokens + len(said_ids))
        finally:
            sequence.release()
        gate.found = replace(gate.found, seconds=time.perf_counter() - start)
        return exact

    return passed
