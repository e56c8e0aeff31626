"""A fault of one answer ends that answer with its error, and no other of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_driver import CoreDriver, Listener, StoredEngine, ids_of, open_stored_engine

from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.events import Failed, Limits

BATCH = Limits(max_sequences=4, enable_prefix_caching=False, pool_tokens=4096)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("isolation"), num_hidden_layers=2) as stored:
        yield stored


class Planted(Exception):
    """The fault that a test plants."""


def fail(*_: object, **__: object) -> Any:
    raise Planted


def in_draw(sequence: Sequence) -> None:
    output_of(sequence)._sampler.adjusted = fail  # type: ignore[method-assign]


def in_grammar(sequence: Sequence) -> None:
    grammar = output_of(sequence)._sampler.grammar
    assert grammar is not None
    grammar.take = fail  # type: ignore[method-assign]


def in_what_looks_at_logits(sequence: Sequence) -> None:
    output_of(sequence).on_logits = (fail,)


def in_stop_condition(sequence: Sequence) -> None:
    output_of(sequence)._detokenizer.push = fail  # type: ignore[method-assign]


def output_of(sequence: Sequence) -> SequenceOutput:
    assert sequence.output is not None
    return sequence.output


def three_at_once(stored: StoredEngine, limits: Limits) -> tuple[CoreDriver, list[Listener]]:
    """A driver in which three answers decode in one batch, the second with a grammar."""
    driver = CoreDriver(stored, limits)
    texts = ("where does Mara work?", "who keeps a parrot at home?", "what is near the harbor?")
    forms: list[dict[str, object]] = [{}, {"regex": "[a-z ]{20,30}"}, {}]
    listeners = [
        driver.arrive(stored.question(text, max_tokens=12, **form))[0] for text, form in zip(texts, forms, strict=True)
    ]
    while sum(len(state.sequences) and state.num_started for state in driver.core.scheduler.states) < 3:
        driver.step()
    return driver, listeners


@pytest.mark.parametrize("plant", [in_draw, in_grammar, in_what_looks_at_logits, in_stop_condition])
def test_a_fault_of_one_answer_ends_no_other(stored: StoredEngine, plant: Callable[[Sequence], None]) -> None:
    driver, listeners = three_at_once(stored, BATCH)
    driver.run()
    expected = [ids_of(listener) for listener in listeners]
    driver, listeners = three_at_once(stored, BATCH)
    plant(driver.core.scheduler.states[1].sequences[0])
    driver.run()
    last = listeners[1].last.result(0)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Planted)
    assert [ids_of(listeners[index]) for index in (0, 2)] == [expected[0], expected[2]]
    assert (driver.core.counts.failed, driver.core.counts.finished) == (1, 2)


def test_a_fault_of_a_batch_ends_no_other(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, listeners = three_at_once(stored, BATCH)
    driver.run()
    expected = [ids_of(listener) for listener in listeners]
    driver, listeners = three_at_once(stored, BATCH)
    executor = driver.core._executor
    decode_batch = executor._decode_batch
    monkeypatch.setattr(executor, "_batches", lambda sequences: [[sequence] for sequence in sequences])
    monkeypatch.setattr(
        executor,
        "_decode_batch",
        lambda batch, step: fail() if batch[0].state.number == 1 else decode_batch(batch, step),
    )
    driver.run()
    last = listeners[1].last.result(0)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Planted)
    assert [ids_of(listeners[index]) for index in (0, 2)] == [expected[0], expected[2]]


def test_a_fault_of_a_feature_ends_its_request_alone(stored: StoredEngine) -> None:
    for method in ("on_slice", "on_prefill", "on_attention", "review", "on_complete", "on_answer", "on_done"):
        driver = CoreDriver(stored, BATCH)
        listeners = [driver.arrive(stored.question(text))[0] for text in ("who?", "where?")]
        setattr(driver.core.scheduler.states[1].hooks[0], method, fail)
        driver.run()
        last = listeners[1].last.result(0)
        assert isinstance(last, Failed), method
        assert isinstance(last.error, Planted)
        assert ids_of(listeners[0])


def test_a_failed_launch_of_several_prompts_is_logged_and_counted(
    stored: StoredEngine, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["who keeps a parrot at home near the harbor " * 3 + end for end in ("?", "!")]
    asked = [replace(stored.question(text), keys=()) for text in texts]
    expected = [CoreDriver(stored, BATCH).ask(question) for question in asked]
    driver = CoreDriver(stored, BATCH)
    prefill = driver.core.worker.prefill

    def fails(numbers: list[int], max_rows: int, waits: bool) -> Any:
        return fail() if len(numbers) > 1 else prefill(numbers, max_rows, waits)

    driver.core.worker.prefill = fails  # type: ignore[method-assign, assignment]
    listeners = [driver.arrive(question)[0] for question in asked]
    with caplog.at_level(logging.WARNING, "cacheblend"):
        driver.run()
    assert [ids_of(listener) for listener in listeners] == expected
    assert (driver.core.counts.split, driver.core.counts.joined) == (1, 0)
    assert "Planted" in caplog.text
