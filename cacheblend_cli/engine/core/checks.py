"""Checks of an answer against a full prefill: their inputs and results."""

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
"""Maximum logits of an answer that --verify keeps in host memory: 450 tokens with a vocabulary of 150,000."""


@dataclass(eq=False)
class Checks:
    """Checks requested for an answer, the data collected for them while it is generated, and their results."""

    verify: bool
    confirm: bool
    fit: RiskFit | None = None
    limit: float = 0.0  # maximum risk
    top1: list[Tensor] = field(default_factory=list)  # most likely token at each position of the answer, [] int64
    logits: list[Tensor] = field(default_factory=list)  # at the first positions, fp32 [vocab_size] on the host
    signals: list[Tensor] = field(default_factory=list)  # of each token, see risk.py
    verification: Verification | None = None
    confirmation: Confirmation | None = None
    risk: Risk | None = None

    @classmethod
    def of(cls, request: Request) -> Checks | None:
        """Return the request's checks, None without any. Raises UsageError if the risk was never fitted."""
        fit, options = _fit_of(request), request.options
        if fit is None and not (options.verify or options.confirm):
            return None
        return cls(options.verify, options.confirm, fit, request.blend.max_risk or 0.0)

    def see(self, logits: Tensor) -> None:
        """Keep the checks' data from the logits, fp32 [vocab_size], that the next token is drawn from."""
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
        self.risk = Risk(0.0, self.limit)
        if plan.inexact_tokens:
            of_tokens = self.fit.of_tokens(torch.cat(self.signals))
            self.risk = Risk(float(1 - (1 - of_tokens).prod()), self.limit, len(of_tokens))
        return self.risk.estimate > self.limit


def _fit_of(request: Request) -> RiskFit | None:
    """Return the fit of the request's risk, None without a limit or inexact KV. Raises UsageError."""
    if request.blend.max_risk is None or not request.plan.inexact_tokens:
        return None
    if max(request.sampling.n, request.sampling.best_of) > 1:
        raise UsageError("max_risk applies to one answer", "ask for one, or without max_risk")
    pairs = zip(request.plan.chunks, request.chunks, strict=True)
    contexts = {c.manifest.context for segment, c in pairs if segment.status == "blended" and c.manifest is not None}
    fit = RiskFile.of(request.collection, list(contexts), request.blend).read()
    if fit is None:
        raise UsageError(
            "--max-risk needs a fit for this model, the context of these chunks and these blend settings",
            "fit it on questions with contexts: cacheblend eval QUESTIONS.jsonl --fit-risk, with the same settings",
        )
    return fit


def seeded(request: Request) -> Request:
    """Return the request with a seed if it samples at random, so that its tokens can be drawn again."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))
