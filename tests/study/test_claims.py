"""The study of the check of claims: changes are told from what a text has, and pairs of answers are compared."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from study_modules import study_modules

TEXT = "On Friday Mara Lind pays 45 euros for room 312 since 3 May 2024."


@pytest.fixture(scope="module")
def claims() -> Iterator[ModuleType]:
    with study_modules(register=True) as load:
        yield load("claims")


def record(answer: str, mode: str = "full", number: int = 0) -> dict[str, Any]:
    return {"model": "m", "number": number, "mode": mode, "question": "who?", "passages": [TEXT], "answer": answer}


def test_each_change_is_to_what_the_text_lacks(claims: ModuleType) -> None:
    for kind, count in (("figure", 4), ("name", 3)):
        changed = [answer for _, answer, _ in claims.changed(record(TEXT), kind)]
        assert len(changed) == count
        assert all(sum(a != b for a, b in zip(answer, TEXT, strict=False)) >= 1 for answer in changed)
    row = claims.of_answers("set", [record(TEXT)])
    assert (row["not_found"], row["figure"], row["name"]) == (0, [4, 4], [3, 3])


def test_pairs_that_differ_in_a_claim(claims: ModuleType) -> None:
    records = [
        record("Mara Lind pays 45 euros.", "full", 1), record("Mara Lind paid 45 euros.", "blended", 1),
        record("Mara Lind pays 45 euros.", "full", 2), record("Maria Lind pays 45 euros.", "blended", 2),
        record("It is room 312.", "full", 3), record("It is room 45.", "blended", 3),
    ]  # fmt: skip
    row = claims.of_differing("set", records)
    assert row == {"set": "set", "pairs": 3, "differing": 2, "marked": 1, "others_marked": 0}
