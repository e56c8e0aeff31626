"""Answers that say that the texts lack the answer."""

from __future__ import annotations

import pytest

from cacheblend_cli.claims.abstention import abstains, text_with_words_of

TRAVEL = (
    "# Travel policy\n\nValid from 1 January 2025.\n\nThe daily allowance is 52 euros. Hotels may cost up to 125 euros."
)
PARKING = "# Parking\n\nA permit costs 40 euros a month. Visitors park behind the harbor."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("not in the documents", True),
        ("Not in the documents.", True),
        ("The price of a hotel is not mentioned in the provided documents.", True),
        ("The documents do not say how much a hotel may cost.", True),
        ("The given text doesn't provide any information about it.", True),
        ("There is no information about hotels.", True),
        ("I don\N{RIGHT SINGLE QUOTATION MARK}t know.", True),
        ("Das steht nicht in den Dokumenten.", True),
        ("Ce n'est pas dans les documents.", True),
        ("La respuesta no está en los documentos.", True),
        ("A hotel may cost 125 euros.", False),
        ("Dogs are not allowed in the office.", False),
        ("The permit does not cost more than 40 euros.", False),
        ("Put the documents in the folder. " * 20 + "This is not in the documents.", False),
    ],
)
def test_an_abstention_is_recognised(answer: str, expected: bool) -> None:
    assert abstains(answer) == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("How much may a hotel cost in 2025?", 1),
        ("What was the daily allowance in the travel policy?", 1),
        ("Where may a visitor park?", 0),
        ("Who leads the billing team?", None),
        ("How much is lunch?", None),
        ("What?", None),
    ],
)
def test_the_text_with_the_questions_words(question: str, expected: int | None) -> None:
    assert text_with_words_of(question, [PARKING, TRAVEL]) == expected


def test_words_of_a_text_without_spaces() -> None:
    assert text_with_words_of("酒店每晚最多多少钱?", ["停车证每月四十欧元。", "酒店每晚最多125欧元。"]) == 1
