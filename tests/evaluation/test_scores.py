"""Scores against references, on values worked out by hand."""

from __future__ import annotations

import sys

import pytest

from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation import scores
from cacheblend_cli.evaluation.scores import exact_match, f1, has_answer, rouge_l


def test_exact_match_ignores_case_articles_and_punctuation() -> None:
    assert exact_match("The  Lantern.", ["lantern"])
    assert not exact_match("Lantern house", ["lantern"])
    assert not exact_match("Lantern", [])


def test_a_sentence_has_the_answer_as_whole_words() -> None:
    assert has_answer("It is the Red Lantern, in Bergen.", ["red lantern"])
    assert not has_answer("It is the red lanterns.", ["red lantern"])
    assert not has_answer("Lantern", [])


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("red green blue", ["red green"], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("red red", ["red"], 2 * 0.5 / 1.5),
        ("red", ["blue", "red"], 1.0),
        ("", [""], 1.0),
        ("", ["red"], 0.0),
        ("red", [], 0.0),
    ],
)
def test_f1(answer: str, references: list[str], score: float) -> None:
    assert f1(answer, references) == pytest.approx(score)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    assert rouge_l("a b c d", ["a c d"]) == pytest.approx(2 * 0.75 / 1.75)
    assert rouge_l("d c b a", ["a b c d"]) == pytest.approx(0.25)
    assert rouge_l("x y", ["a", "x y"]) == 1.0
    assert rouge_l("x", []) == 0.0


def test_without_rouge_score_the_other_scores_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    scores._scorer.cache_clear()
    assert rouge_l("a b", ["a b"]) is None
    with pytest.raises(UsageError) as error:
        scores.check_rouge()
    assert "[eval]" in (error.value.hint or "")
    monkeypatch.undo()
    scores._scorer.cache_clear()
