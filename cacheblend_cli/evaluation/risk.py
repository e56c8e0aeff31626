"""The risk that answers differ from a full prefill's: fitted on what was measured, and what the riskiest of them hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.engine.risk import fit_risk
from cacheblend_cli.evaluation.records import Record

Tokens = tuple[Tensor, Sequence[bool]]
"""Of an answer: the signals of its tokens [num_tokens, SIGNALS], and of which a full prefill would have another one most likely."""


def tokens_of(records: Sequence[Record]) -> list[Tokens]:
    """Of those that were measured with signals."""
    return [(torch.tensor(r.signals, dtype=torch.float64), [not same for same in r.top1]) for r in records if r.signals]


def halves(answers: Sequence[Tokens]) -> list[Tokens]:
    """The answers, and in the place of each token's signals its risk by a fit on those of the other half, every second one.
    Raises UsageError where a half is too small for one."""
    fits = [fit_risk(answers[n::2]) for n in (1, 0)]
    return [(fits[n % 2].of_tokens(signals), differs) for n, (signals, differs) in enumerate(answers)]


def answer_risks(risks: Tensor) -> Tensor:
    """Of the answer up to and with each of its tokens, [num_tokens]."""
    return 1 - (1 - risks).cumprod(0)


def captured(answers: Sequence[Tokens], share: float = 0.2) -> float:
    """Of the answers that differ, the part that is among this share of the riskiest ones. answers: with risks for signals."""
    ranked = sorted(answers, key=lambda a: -float(answer_risks(a[0])[-1]))
    first = ranked[: round(share * len(ranked))]
    return sum(any(d) for _, d in first) / max(1, sum(any(d) for _, d in ranked))
