"""Scores of an answer against its references: exact match, substring match and F1 with SQuAD's normalisation, and
ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.extras import install_hint

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and extra spaces (Rajpurkar et al., 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> bool:
    return any(normalise(answer) == normalise(r) for r in references)


def has_answer(answer: str, references: Sequence[str]) -> bool:
    """Return whether the words of a reference are in the answer in a row (substring exact match)."""
    return any(f" {normalise(r)} " in f" {normalise(answer)} " for r in references)


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best token F1 over the references, 0 to 1."""
    return max((_f1(normalise(answer).split(), normalise(r).split()) for r in references), default=0.0)


def _f1(answer: list[str], reference: list[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    if not answer or not reference or not common:
        return float(answer == reference)
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, references: Sequence[str]) -> float | None:
    """Return the best ROUGE-L F-measure over the references (Lin, 2004; with stemming), 0 to 1; None without
    rouge-score."""
    if not references:
        return 0.0
    scorer = _scorer()
    return None if scorer is None else float(scorer.score_multi(list(references), answer)["rougeL"].fmeasure)


def check_rouge() -> None:
    if _scorer() is None:
        raise UsageError("eval needs rouge-score, which is not installed", install_hint("eval"))


@cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        return None
    return RougeScorer(["rougeL"], use_stemmer=True)
