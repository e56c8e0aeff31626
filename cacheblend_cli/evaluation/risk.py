"""Risk that answers differ from a full prefill's: fit, and share of differing answers among the riskiest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.blend.risk import RiskFile, RiskFit
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.settings import Setting

RIDGE = 1.0
"""Penalty of a weight: half its square, in units of the log-likelihood. It keeps weights finite if the signals separate
the tokens completely."""
LEAST = 3
"""Minimum number of differing answers for a fit."""
Tokens = tuple[Tensor, Sequence[bool]]
"""Signals of an answer's tokens [num_tokens, SIGNALS], and for which of them a full prefill prefers another token."""


def tokens_of(records: Sequence[Record]) -> list[Tokens]:
    return [(torch.tensor(r.signals, dtype=torch.float64), [not same for same in r.top1]) for r in records if r.signals]


def keep_fit(engine: Engine, setting: Setting, answers: Sequence[Tokens]) -> RiskFit:
    """Fit the risk of a setting's answers, and keep it for `ask --max-risk`. Raises UsageError if they are too few."""
    fit = fit_risk(answers)
    RiskFile.of(engine.collection(None), [setting.context], setting.blend).write(fit)
    return fit


def fit_risk(answers: Sequence[Tokens]) -> RiskFit:
    """Fit by Newton's method. Raises UsageError if fewer than LEAST answers differ from a full prefill's."""
    differing = sum(any(differs) for _, differs in answers)
    if differing < LEAST:
        raise UsageError(
            f"{differing} of {len(answers)} answers differ from a full prefill's; a fit needs {LEAST}",
            "fit on more questions, or longer answers (--max-tokens)",
        )
    x = torch.cat([signals for signals, _ in answers])
    y = torch.tensor([token for _, differs in answers for token in differs], dtype=torch.float64)
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-9)
    x = torch.cat(((x - mean) / scale, torch.ones(len(x), 1, dtype=torch.float64)), 1)
    penalty = torch.tensor([RIDGE] * (x.shape[1] - 1) + [1e-6], dtype=torch.float64)
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(x @ w)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + torch.diag(penalty)
        step = torch.linalg.solve(hessian, x.T @ (p - y) + penalty * w)
        size = float(step.abs().max())
        w -= step * min(1.0, 2.0 / max(size, 1e-12))  # far from the optimum a whole step goes too far
        if size < 1e-9:
            break
    weights = w[:-1] / scale
    bias = float(w[-1] - weights @ mean)
    return RiskFit(tuple(weights.tolist()), bias, len(y), len(answers), differing)


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
