"""`--max-risk`: estimate the probability that an answer from blended KV differs from a full prefill's, token by token.

Tokens are generated over blended KV while that probability stays below the limit. The first token that would exceed it is drawn
after a full prefill of the prompt and the tokens so far, and so are all that follow: tokens already generated stand, and the
expected share of answers that differ is at most the limit. Where the answer is not streamed, none of its tokens stand: all of it
is generated again from a full prefill's KV, as if it had been judged when it was complete.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cacheblend_cli.engine.chunk_inputs import chunk_of
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.risk import RiskFile, RiskFit, signals_of
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import Risk


class Gate:
    """Risk of one answer. found: the estimate so far. judges_whole: above the limit, all of the answer is replaced."""

    def __init__(self, fit: RiskFit, limit: float, *, judges_whole: bool) -> None:
        self._fit, self.found, self.judges_whole = fit, Risk(0.0, limit), judges_whole

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
        return cls(fit, request.blend.max_risk, judges_whole=not request.options.stream)

    def too_risky(self, logits: Tensor) -> bool:
        """Return whether drawing the next token from these logits [vocab_size], of blended KV, would exceed the limit. Call it once a token,
        until it returns True."""
        token = float(self._fit.of_tokens(signals_of(logits[None]))[0])
        risk = 1 - (1 - self.found.estimate) * (1 - token)
        above = risk > self.found.limit
        if not above:
            self.found = replace(self.found, estimate=risk, tokens=self.found.tokens + 1)
        elif self.judges_whole:
            self.found = Risk(0.0, self.found.limit, full_prefill_at=0)
        else:
            self.found = replace(self.found, full_prefill_at=self.found.tokens)
        return above


def _contexts(request: Request) -> list[str]:
    """Return the contexts of the chunks that need repair."""
    keys = [s.key for s in request.plan.chunks if s.status == "blended" and s.key]
    assert request.store is not None
    return list({chunk.context for key in keys if (chunk := chunk_of(request.store, key)) is not None})
