"""Claims of an answer: where they are found, and what is done about those that are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_cli import Engine
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.types import Answer

HELDOUT = Path(__file__).parents[1] / "demo/heldout.jsonl"
SPELLED, MISSPELLED, CHANGED = (
    "What does Torben Orlov drink?",
    "When is Bettina Lindqvist on call?",
    "Where does Ilse Vossler live?",
)
"""Questions whose names the model copies; misspells, with any KV; misspells otherwise with a full prefill."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("handbook", max_tokens=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def pages() -> dict[str, list[str]]:
    samples: dict[str, Sample] = {sample.question: sample for sample in read_samples(HELDOUT)}
    return {name: [c.text for c in samples[name].contexts] for name in (SPELLED, MISSPELLED, CHANGED)}


def found(answer: Answer) -> list[tuple[str, bool]]:
    return [(claim.text, claim.found) for claim in answer.claims]


def test_claims_are_found_in_a_chunk_or_not(engine: Engine, pages: dict[str, list[str]]) -> None:
    answer = engine.ask(SPELLED, documents=pages[SPELLED])
    (claim,) = answer.claims
    assert (claim.text, claim.kind, claim.found) == ("Torben Orlov", "name", True)
    assert claim.chunk is not None
    assert "Torben Orlov" in pages[SPELLED][claim.chunk]
    answer = engine.ask(MISSPELLED, documents=pages[MISSPELLED])
    assert found(answer) == [("Betta Lind", False), ("Friday", True)]
    assert answer.to_dict()["claims"][0] == {
        "text": "Betta Lind", "start": 16, "end": 26, "kind": "name", "found": False, "chunk": None, "place": "",
    }  # fmt: skip


def test_without_chunks_nothing_is_looked_up(engine: Engine) -> None:
    assert engine.ask("Who is Betta Lind?", max_tokens=8).claims == []


def test_only_an_unsupported_answer_is_confirmed(engine: Engine, pages: dict[str, list[str]]) -> None:
    def ask(question: str, **settings: str) -> Answer:
        return engine.ask(question, documents=pages[question], **settings)

    assert ask(SPELLED, on_unsupported="confirm").confirmation is None
    same = ask(MISSPELLED, on_unsupported="confirm")
    assert same.confirmation is not None
    assert same.confirmation.confirmed
    drafted, full = ask(CHANGED), ask(CHANGED, mode="full")
    assert drafted.text != full.text
    changed = ask(CHANGED, on_unsupported="confirm")
    assert changed.confirmation is not None
    assert changed.confirmation.blended_answer == drafted.text
    assert (changed.text, found(changed)) == (full.text, found(full))  # claims are the final answer's


def test_a_draft_is_streamed_only_to_those_who_replace_it(engine: Engine, pages: dict[str, list[str]]) -> None:
    drafted, full = (engine.ask(CHANGED, documents=pages[CHANGED], mode=mode).text for mode in ("blend", "full"))
    request = engine.request(CHANGED, documents=pages[CHANGED], on_unsupported="confirm")
    assert "".join(engine.stream(request)) == drafted
    held_back = replace(request, options=replace(request.options, drafts=False))
    assert "".join(engine.stream(held_back)) == full != drafted


def test_an_unsupported_answer_is_refused_before_anything_is_shown(engine: Engine, pages: dict[str, list[str]]) -> None:
    shown = list[str]()
    with pytest.raises(NotFoundError, match='withheld: not in the sources: "Betta Lind"'):
        shown += engine.stream(MISSPELLED, documents=pages[MISSPELLED], on_unsupported="refuse")
    assert shown == []
    shown += engine.stream(SPELLED, documents=pages[SPELLED], on_unsupported="refuse")
    assert "".join(shown) == "The drink of Torben Orlov is cocoa."


def test_an_abstention_over_a_text_with_the_questions_words_is_confirmed(
    engine: Engine, pages: dict[str, list[str]]
) -> None:
    def ask(question: str, regex: str = "It is not in the documents\\.", **settings: str) -> Answer:
        request = engine.request(question, documents=pages[SPELLED], **settings)
        return engine.ask(replace(request, sampling=replace(request.sampling, regex=regex)))

    ask(SPELLED)  # stores the KV
    assert any("full prefill" in note for note in ask(SPELLED).notes)
    confirmed = ask(SPELLED, on_unsupported="confirm")
    assert confirmed.confirmation is not None
    assert confirmed.confirmation.confirmed
    assert not any("full prefill" in note for note in confirmed.notes)
    assert not any("full prefill" in note for note in ask(SPELLED, mode="full").notes)
    assert ask(SPELLED, on_unsupported="refuse").text == "It is not in the documents."
    other = "Why is grass so green in Iceland?"
    assert ask(other, on_unsupported="confirm").confirmation is None
    assert not any("full prefill" in note for note in ask(other).notes)


def test_what_is_not_looked_up_is_said_once(
    engine: Engine, pages: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.claims.passages.MAX_STEPS", 1)
    request = engine.request(SPELLED, documents=pages[SPELLED])
    sampling = replace(request.sampling, regex="It is 987 or 654\\.", n=2)
    answer = engine.ask(replace(request, sampling=sampling))
    assert answer.claims == []
    assert ["not looked up" in note for note in answer.notes].count(True) == 1
