"""Scores of whole answers: by their first line, by part of the questions, and whether a text of the prompt has what
they say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cacheblend_cli.claims import check
from cacheblend_cli.evaluation.evaluate import Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.scores import exact_match, f1


def contains_reference(sample: Sample, record: Record) -> bool:
    """Return whether the record's answer contains a reference answer."""
    return any(answer.lower() in record.answer.lower() for answer in sample.answers)


def has_unsupported(sample: Sample, record: Record) -> bool:
    """Return whether the check of claims (docs/gate.md) marks something in the answer."""
    texts = [*(context.text for context in sample.contexts), sample.question]
    return any(claim.place is None for claim in check(record.answer, texts))


def first_lines(results: Results, samples: Sequence[Sample]) -> Results:
    """End each answer at its first line, and score it again: base models go on with questions of their own. Whether it
    is the same answer as full prefill's stays a matter of the whole text."""
    by_label = {
        label: [_first_line(*pair) for pair in zip(samples, records, strict=True)]
        for label, records in results.by_label.items()
    }
    return replace(results, by_label=by_label)


def _first_line(sample: Sample, record: Record) -> Record:
    text = record.answer.strip().partition("\n")[0]
    of = text, sample.answers
    return replace(record, answer=text, exact_match=exact_match(*of), f1=f1(*of))


def parts_of(results: Results, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return a row per part of the questions: their number, and F1 of each setting's answers."""
    rows = []
    for part in dict.fromkeys(sample.tags["part"] for sample in samples):
        own = [place for place, sample in enumerate(samples) if sample.tags["part"] == part]
        scores = {
            label: round(statistics.fmean(records[place].f1 or 0.0 for place in own), 5)
            for label, records in results.by_label.items()
        }
        rows.append({"part": part, "questions": len(own), "f1": scores})
    return rows
