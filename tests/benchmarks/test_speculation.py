"""benchmarks/speculation.py: what is asked, answers that must be equal, sums and the page."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

KINDS = ("quote", "office", "office, long", "free")


@pytest.fixture
def speculation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("speculation")


class FakeEngine:
    """Gives one answer, of which each call proposes and accepts tokens."""

    def __init__(self, ids: list[int], rate: float, accepted: int = 0) -> None:
        self.proposed, self._accepted = 0, accepted
        self._answer = SimpleNamespace(
            text="", generated_ids=ids, accepted_tokens=accepted, timing=SimpleNamespace(decode_tokens_per_s=rate)
        )
        self.service = SimpleNamespace(stats=lambda: SimpleNamespace(proposed=self.proposed))

    def ask(self, question: str, documents: list[str]) -> Any:
        self.proposed += 3 * self._accepted
        return self._answer


def result_of(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    case = {"weights": "Q4_1", "dtype": "bfloat16", "others": 0.0, "rounds": rounds}
    hardware = {"cores": 2, "memory_gib": 8, "threads": 2, "torch": "2"}
    return {
        "one, AVX2": {"rounds": 2, "tokens": 9, "questions": 1, "hardware": hardware, "cases": {"smollm2, file": case}}
    }


def test_every_kind_has_up_to_as_many_questions_over_ten_pages(speculation: ModuleType) -> None:
    texts, questions = speculation.pages_and_questions(8)
    assert len(texts) == 10
    assert {kind: len(own) for kind, own in questions.items()} == dict(zip(KINDS, (8, 8, 8, 4), strict=True))
    assert questions["office, long"][0] == questions["office"][0] + speculation.LONG
    assert len(set(questions["quote"])) == 8


def test_seconds_are_those_of_the_tokens_after_the_first(speculation: ModuleType) -> None:
    ids = [5, 6, 7, 8, 9]
    found = speculation.ask_both({"off": FakeEngine(ids, 2.0), "auto": FakeEngine(ids, 8.0, 2)}, "?", [], True)
    assert found == {"answers": 1, "decoded": 4, "accepted": 2, "proposed": 6, "off_s": 2.0, "auto_s": 0.5}
    assert speculation.added([found, found])["decoded"] == 8
    short = {"off": FakeEngine([5, 6], 2.0), "auto": FakeEngine([5, 6], 2.0)}
    assert speculation.ask_both(short, "?", [], False) is None


def test_answers_that_differ_end_the_script(speculation: ModuleType) -> None:
    with pytest.raises(SystemExit, match="differ"):
        speculation.ask_both({"off": FakeEngine([5, 6, 7], 1.0), "auto": FakeEngine([5, 6, 8], 1.0)}, "?", [], False)


def test_the_page_has_ratios_of_all_seconds_and_of_each_round(speculation: ModuleType) -> None:
    one = {"answers": 1, "decoded": 10, "accepted": 5, "proposed": 8, "off_s": 4.0, "auto_s": 1.0}
    rounds = [{"quote": one, "free": one}, {"quote": one | {"auto_s": 3.0}}]
    page = speculation.page(result_of(rounds))
    assert (
        "| smollm2 | Q4_1 | bfloat16 | quote | 2 | 22 | 2.00 | 10 / 16 | 2.5 | 5.0 | 2.00 | 1.33 to 4.00 | 0.00 |"
        in page
    )
    assert "| free | 1 | 11 | 2.00 | 5 / 8 | 2.5 | 10.0 | 4.00 | 4.00 to 4.00 |" in page
    assert "    python benchmarks/speculation.py --models DIR --rounds 2 --tokens 9 --questions 1\n" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + len(KINDS)  # a kind without answers has a line, too
