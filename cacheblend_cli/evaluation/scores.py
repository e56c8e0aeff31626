"""Scores of an answer against its references: exact match and F1 with SQuAD's normalisation, and ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces (Rajpurkar et al., 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer is one of the references after normalisation."""
    return any(normalise(answer) == normalise(r) for r in references)


def f1(answer: str, references: Sequence[str]) -> float:
    """The best token F1 over the references, 0 to 1."""
    return max((_f1(normalise(answer).split(), normalise(r).split()) for r in references), default=0.0)


def _f1(answer: list[str], reference: list[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    if not answer or not reference or not common:
        return float(answer == reference)
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """The best ROUGE-L F-measure over the references (Lin, 2004; stemmed, as rouge-score computes it), 0 to 1."""
    if not references:
        return 0.0
    return float(_scorer().score_multi(list(references), answer)["rougeL"].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
