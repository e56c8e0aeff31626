"""Figures of `rerank.py`'s records: orders of the hits by query likelihood, by a judgement and by attention, each alone
and with the search's score.

What has to be chosen (heads, the weight beside the search's score) is chosen over all sets, each of which counts as
much: for the questions in even places on those in odd places, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference

Found = Mapping[str, Any]
"""What was recorded for a question."""
Scores = Callable[[Found], Tensor]
"""Returns a score of each hit, [hits] fp32, higher is better."""
Sets = Mapping[str, Sequence[Found]]
AT = (1, 5)
WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
HEADS = 16
MEAN, LAST = 0, 1  # kinds of rows that look, see `rerank.py: Watching`


def standard(scores: Tensor) -> Tensor:
    """Return scores of mean 0 and deviation 1 along the first axis."""
    scores = scores.float()
    return (scores - scores.mean(0)) / scores.std(0, correction=0).clamp_min(1e-6)


def of_heads(found: Found, where: str, kind: int) -> Tensor:
    """Return the attention on each hit minus that of an empty question, [hits, layers * heads]. Hits that were not in
    the prompt come last."""
    more = (found[f"{where}_asked"].float() - found[f"{where}_empty"].float())[..., kind].flatten(1)
    missing = len(found["match"]) - len(more)
    return torch.cat((more, more.min(0).values.expand(missing, -1)))


def attention(found: Found, where: str) -> Tensor:
    """ICR: the mean over layers and heads (arXiv 2410.02642)."""
    return of_heads(found, where, MEAN).mean(1)


def few_heads(where: str, kind: int, fit: Sets) -> Scores:
    """The heads that tell answering hits from others best (CoRe, arXiv 2510.02219)."""

    def apart(found: Found) -> Tensor:
        return standard(of_heads(found, where, kind)).T

    told = []
    for records in fit.values():
        of_set = [apart(found)[:, found["right"]].amax(1) for found in records if found["right"].any()]
        told += [torch.stack(of_set).mean(0)] if of_set else []
    best = torch.stack(told).mean(0).topk(HEADS).indices
    return lambda found: apart(found)[best].mean(0)


@dataclass(frozen=True)
class Method:
    """A way to order hits. fit: makes it from questions with known answers."""

    name: str
    fit: Callable[[Sets], Scores]


def fused(method: Method) -> Method:
    """Add the search's score, with the weight of the method that has the best chunk first most often."""

    def fit(sets: Sets) -> Scores:
        own = method.fit(sets)

        def beside(found: Found, weight: float) -> Tensor:
            return standard(found["match"]) + weight * standard(own(found))

        def quality(weight: float) -> tuple[float, ...]:
            return tuple(
                round(sum(share(hit(found, beside(found, weight), k) for found in of) for of in sets.values()), 6)
                for k in AT
            )

        return partial(beside, weight=max(WEIGHTS, key=quality))

    return Method(f"search + {method.name}", fit)


def plain(name: str, scores: Scores) -> Method:
    return Method(name, lambda sets: scores)


def methods() -> list[Method]:
    own = [
        plain("likelihood, in the message", lambda found: found["line"]),
        plain("likelihood, as a reply", lambda found: found["turn"]),
        plain("yes or no", lambda found: found["yes"]),
        plain("attention, each alone", partial(attention, where="alone")),
        plain("attention, together", partial(attention, where="together")),
        Method(f"{HEADS} heads, each alone", partial(few_heads, "alone", LAST)),
        Method(f"{HEADS} heads, together", partial(few_heads, "together", LAST)),
    ]
    return [plain("search", lambda found: found["match"]), *own, *map(fused, own)]


def hit(found: Found, scores: Tensor, k: int) -> bool:
    """Return whether one of the k best answers."""
    return bool(found["right"][scores.argsort(descending=True, stable=True)[:k]].any())


def share(outcomes: Iterable[bool]) -> float:
    counted = [*outcomes]
    return sum(counted) / max(1, len(counted))


def scored(method: Method, sets: Sets) -> dict[str, list[Tensor]]:
    """Return the scores for each question of each set, by a choice on the other half."""
    halves = [method.fit({name: of[1 - half :: 2] for name, of in sets.items()}) for half in (0, 1)]
    return {name: [halves[place % 2](found) for place, found in enumerate(of)] for name, of in sets.items()}


def rows_of(sets: Sets) -> list[dict[str, Any]]:
    """Return a row per set and method: shares of questions with an answering hit first and among the five best, and
    their differences from the search's, each with a 95 % interval over the questions."""
    rows, search = list[dict[str, Any]](), dict[tuple[str, int], list[float]]()
    for method in methods():
        scores = scored(method, sets)
        for name, records in sets.items():
            bootstrap = Bootstrap(len(records))
            row: dict[str, Any] = {"questions": name, "count": len(records), "method": method.name}
            for k in AT:
                hits = [float(hit(found, of, k)) for found, of in zip(records, scores[name], strict=True)]
                row[f"at_{k}"] = round(share(map(bool, hits)), 4)
                if search.setdefault((name, k), hits) is not hits:
                    less = bootstrap.interval(difference, hits, search[name, k])
                    assert less is not None, "there are questions"
                    row[f"difference_{k}"] = [round(number, 4) for number in (less.value, less.low, less.high)]
            rows.append(row)
    return sorted(rows, key=lambda row: [*sets].index(row["questions"]))


def best_method(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the method without the search's score that has the best chunk first most often. rows: of one set."""
    alone = [row for row in rows if not row["method"].startswith("search")]
    best: str = max(alone, key=lambda row: tuple(row[f"at_{k}"] for k in AT))["method"]
    return best


def weak_rows(own: Sequence[Found], others: Sequence[Found]) -> list[dict[str, Any]]:
    """Return, for each score that can be compared between questions, how often the best hit of a question about the
    documents has a higher one than that of a question about others."""
    named = {
        "search": "match",
        "likelihood, in the message": "line",
        "likelihood, as a reply": "turn",
        "yes or no": "yes",
    }
    rows = []
    for name, key in named.items():
        ours, theirs = (torch.stack([found[key].float().max() for found in records]) for records in (own, others))
        higher = (ours[:, None] > theirs).float() + 0.5 * (ours[:, None] == theirs).float()
        rows.append(
            {"score": name, "own": len(ours), "others": len(theirs), "told_apart": round(float(higher.mean()), 4)}
        )
    return rows
