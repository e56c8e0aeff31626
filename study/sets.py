"""The sets of the study: questions, the settings that are measured on them, and what is measured.

Questions in even places of a set are for choosing and fitting ("fit"), those in odd places for results ("test").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from answer_set import answer_samples
from questions import (
    all_passages,
    filler,
    layouts,
    musique,
    needles,
    office,
    paged_passages,
    pairs,
    rag,
    spellable_samples,
    tracking,
)
from settings import (
    answer_settings,
    context_settings,
    handbook_settings,
    leading_settings,
    pair_settings,
    wide_settings,
)

from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Setting

REAL = ("kl", "kl_median", "kl_p90", "top1", "same_answer", "less_default")
HANDBOOK = ("exact_match", "f1", "norm_f1", "top1", "kl", "k_error")
LAYOUT = ("exact_match", "f1", "f1_difference", "kl", "same_answer")
MAIN = ("kl", "kl_median", "kl_p90", "top1", "same_start", "less_default")
"""Of --main: no setting answers on its own, which would take half of the time."""
ANSWERS = ("f1", "exact_match", "f1_difference", "same_answer", "kl", "kl_median")
ANSWERED: dict[str, Any] = {
    "measures": ANSWERS, "tokens": 32, "own_tokens": 32, "answerable": True, "keeps_settings": True,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "measures": (
        "exact_match", "f1", "f1_difference", "found", "same_answer", "unsupported", "kl", "kl_median",
    ),
    "tokens": 24,
    "own_tokens": 24,
    "keeps_settings": True,
    "by_part": True,
}  # fmt: skip


@dataclass(frozen=True)
class StudySet:
    """One set. samples: of a data folder, in order. questions: how many are measured by default. halves: whether odd
    and even places are told apart. tokens: of full prefill's answer, over which distributions are compared; own_tokens:
    of a setting's own answer. measures: fields of a result row. context: of chunks under --main. answerable: results
    are over the questions that full prefill answers at least in part. keeps_settings: --main does not change it.
    by_part: answers end at their first line, and are scored for each value of the tag "part", too."""

    samples: Callable[[Path | None], list[Sample]]
    settings: Callable[[], list[Setting]]
    questions: int
    measures: tuple[str, ...] = REAL
    model: str = "smollm2"
    tokens: int = 64
    own_tokens: int = 16
    halves: bool = True
    needs_data: bool = True
    context: str = "sink"
    answerable: bool = False
    keeps_settings: bool = False
    by_part: bool = False

    def for_main(self) -> StudySet:
        """Return the set as --main measures it: full prefill's answers only. Sets of answers stay as they are."""
        return self if self.keeps_settings else replace(self, own_tokens=1, measures=MAIN)


def study_sets() -> dict[str, StudySet]:
    """Return every set by name, in the order in which they are measured."""
    real = {
        "musique": StudySet(lambda data: musique(data, 4), wide_settings, 12),
        "needles-2k": StudySet(lambda data: needles(filler(data), 4), leading_settings, 8),
        "pages": StudySet(paged_passages, lambda: leading_settings("document"), 8, context="document"),
        "tracking-2k": StudySet(lambda data: tracking(filler(data), 4), leading_settings, 6),
        "needles-7k": StudySet(lambda data: needles(filler(data), 13), leading_settings, 3),
        "musique-10": StudySet(lambda data: list(all_passages(data)), leading_settings, 7),
        "pairs": StudySet(pairs, pair_settings, 24, MAIN, tokens=32, own_tokens=1, keeps_settings=True),
        "rag": StudySet(rag, leading_settings, 2),
    }
    answers = {
        "office": StudySet(lambda _: office(), answer_settings, 36, halves=False, needs_data=False, **ANSWERED),
        "answers": StudySet(answer_samples, answer_settings, 200, halves=False, **WHOLE),
    }
    handbook = {
        "handbook": StudySet(lambda _: spellable_samples(), handbook_settings, 520, HANDBOOK),
        **{
            f"handbook-{name}": StudySet(lambda _, name=name: layouts()[name], context_settings, 520, LAYOUT)
            for name in ("pages", "shuffled", "headless")
        },
    }
    own = {"model": "handbook", "tokens": 24, "own_tokens": 24, "halves": False, "needs_data": False}
    return real | answers | {name: replace(found, **own) for name, found in handbook.items()}
