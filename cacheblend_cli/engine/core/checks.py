"""Checks that a request asks for: what they need to see of its answer, and what they found."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_cli.blend.risk import RiskFile, RiskFit, signals_of
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import Confirmation, Risk, Verification

COMPARED_BYTES = 256 * 2**20
"""Logits of an answer that --verify keeps in the host's memory: 450 tokens of a vocabulary of 150,000."""


@dataclass(eq=False)
class Checks:
    """The checks that a request asks for, what they need to see of its answer, and what they found."""

    verify: bool
    confirm: bool
    fit: RiskFit | None = None
    limit: float = 0.0  # of the risk
    top1: list[Tensor] = field(default_factory=list)  # most likely token at each of the answer's, [] int64
    logits: list[Tensor] = field(default_factory=list)  # at the first tokens, fp32 [vocab_size] on the host
    signals: list[Tensor] = field(default_factory=list)  # of each token, see risk.py
    verification: Verification | None = None
    confirmation: Confirmation | None = None
    risk: Risk | None = None

    @classmethod
    def of(cls, request: Request) -> Checks | None:
        """Return the request's checks, None if it has none. Raises UsageError where the risk was never fitted."""
        fit, options = _fit_of(request), request.options
        if fit is None and not (options.verify or options.confirm):
            return None
        return cls(options.verify, options.confirm, fit, request.blend.max_risk or 0.0)

    def see(self, logits: Tensor) -> None:
        """Keep what the checks need of the logits that the answer's next token is drawn from, fp32 [vocab_size]."""
        if self.fit is not None:
            self.signals.append(signals_of(logits[None]))
        if self.verify:
            self.top1.append(logits.argmax(-1))
            if (len(self.logits) + 1) * logits.nbytes <= COMPARED_BYTES:
                self.logits.append(logits.to("cpu", copy=True))

    def judge(self, plan: PromptPlan) -> bool:
        """Return whether the complete answer's risk exceeds the limit. plan: the prompt as it was run."""
        if self.fit is None:
            return False
        self.risk = self._risk(self.fit) if plan.inexact_tokens else Risk(0.0, self.limit)
        return self.risk.estimate > self.risk.limit

    def _risk(self, fit: RiskFit) -> Risk:
        of_tokens = fit.of_tokens(torch.cat(self.signals))
        return Risk(float(1 - (1 - of_tokens).prod()), self.limit, len(of_tokens))


def _fit_of(request: Request) -> RiskFit | None:
    """Return the fit of the request's risk, None without a limit or with exact KV alone. Raises UsageError."""
    if request.blend.max_risk is None or not request.plan.inexact_tokens:
        return None
    if max(request.sampling.n, request.sampling.best_of) > 1:
        raise UsageError("the risk is of one answer", "ask for one answer, or without max_risk")
    pairs = zip(request.plan.chunks, request.chunks, strict=True)
    contexts = {c.manifest.context for segment, c in pairs if segment.status == "blended" and c.manifest is not None}
    fit = RiskFile.of(request.collection, list(contexts), request.blend).read()
    if fit is None:
        raise UsageError(
            "--max-risk is given, and the risk was never fitted for this model, these chunks' context and this way to blend",
            "fit it on questions with their texts: cacheblend eval QUESTIONS.jsonl --fit-risk, with the same settings",
        )
    return fit


def seeded(request: Request) -> Request:
    """Return the request with a seed where tokens are drawn at random, so that they can be drawn again."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))
