"""Risk that answers differ from a full prefill's: fit, and share of differing answers among the riskiest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.engine.core.risk import RiskFile, RiskFit, fit_risk
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.settings import Setting

Tokens = tuple[Tensor, Sequence[bool]]
"""Signals of an answer's tokens [num_tokens, SIGNALS], and for which of them a full prefill prefers another token."""


def tokens_of(records: Sequence[Record]) -> list[Tokens]:
    """Return the tokens of records that have signals."""
    return [(torch.tensor(r.signals, dtype=torch.float64), [not same for same in r.top1]) for r in records if r.signals]


def keep_fit(engine: Engine, setting: Setting, answers: Sequence[Tokens]) -> RiskFit:
    """Fit the risk of a setting's answers, and keep it for `ask --max-risk`. Raises UsageError if they are too few."""
    fit = fit_risk(answers)
    RiskFile.of(engine.runtime.collection(), [setting.context], setting.blend).write(fit)
    return fit


def halves(answers: Sequence[Tokens]) -> list[Tokens]:
    """Return the answers with each token's signals replaced by its risk, from a fit on the other half (every second
    answer). Raises UsageError if a half is too small for a fit."""
    fits = [fit_risk(answers[n::2]) for n in (1, 0)]
    return [(fits[n % 2].of_tokens(signals), differs) for n, (signals, differs) in enumerate(answers)]


def answer_risks(risks: Tensor) -> Tensor:
    """Return the risk of the answer up to and including each token, [num_tokens]."""
    return 1 - (1 - risks).cumprod(0)


def captured(answers: Sequence[Tokens], share: float = 0.2) -> float:
    """Return the share of differing answers that is among this share of the riskiest ones. answers: with risks instead
    of signals."""
    ranked = sorted(answers, key=lambda a: -float(answer_risks(a[0])[-1]))
    first = ranked[: round(share * len(ranked))]
    return sum(any(d) for _, d in first) / max(1, sum(any(d) for _, d in ranked))
