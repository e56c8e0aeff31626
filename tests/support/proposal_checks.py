"""Answers with proposals beside those of a token a step."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

from checkpoints import WORDS
from engine_driver import SAMPLING, CoreDriver, Listener, StoredEngine
from oracle_lookup import Oracle

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Done, Limits
from cacheblend_cli.types import Answer, AskRequest, BlendParams, Progress

LIMITS = Limits(max_sequences=8, pool_tokens=16 * 120, enable_prefix_caching=False)
MOST = 4  # proposals a step
GREEDY: dict[str, Any] = {"max_tokens": 20, "logprobs": 2}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.2, "seed": 5}


def with_proposals(stored: StoredEngine, speculate: int | str = MOST, **config: Any) -> StoredEngine:
    """The same store and weights, with proposals."""
    runtime = stored.engine.runtime
    changed = type(runtime)(runtime.model, replace(runtime.config, speculate=speculate, **config))
    return StoredEngine(Engine(changed), stored.store, stored.keys)


def facts(listener: Listener) -> list[object]:
    """Everything in a request's events that users see, by answer, without durations and numbers of steps."""
    done = listener.done()
    said = [event for event in listener.events if not isinstance(event, Done | Progress)]
    said.sort(key=lambda event: getattr(event, "index", -1))  # answers of one request go on independently
    return [said, list(map(answer_facts, done.answers)), done.ended]


def answer_facts(answer: Answer) -> list[object]:
    checked, confirmed = answer.verify, answer.confirmation
    return [
        *(answer.generated_ids, answer.text, answer.finish_reason, answer.logprobs, answer.chunks, answer.chosen),
        *(answer.reasoning, answer.reasoning_tokens, answer.claims),
        None if checked is None else replace(checked, full_ttft_s=0),
        None if confirmed is None else replace(confirmed, full_ttft_s=0, seconds=0),
    ]


def arrive(driver: CoreDriver, questions: Several[AskRequest], **options: Any) -> list[Listener]:
    return [driver.arrive(question, **options)[0] for question in questions]


def alone(stored: StoredEngine, questions: Several[AskRequest], **options: Any) -> list[Listener]:
    """Each by itself, a token a step."""
    driver, listeners = CoreDriver(stored, LIMITS), list[Listener]()
    assert driver.core.scheduler.speculation is None
    for question in questions:
        listeners += arrive(driver, [question], **options)
        driver.run()
    return listeners


def check(
    stored: StoredEngine,
    oracle: Oracle,
    questions: Several[AskRequest],
    limits: Limits = LIMITS,
    speculate: int = MOST,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[CoreDriver, list[Listener]]:
    """Ask alone without proposals, then together with them. The answers are equal; some proposals were right, some
    wrong."""
    expected = alone(stored, questions, **options)
    oracle.learn(expected)
    driver = CoreDriver(with_proposals(stored, speculate, **config or {}), limits)
    listeners = arrive(driver, questions, **options)
    driver.run()
    assert [facts(listener) for listener in listeners] == [facts(listener) for listener in expected]
    assert_mixed(driver)
    return driver, listeners


def assert_mixed(driver: CoreDriver) -> None:
    counts = driver.core.counts
    assert 0 < counts.accepted < counts.proposed


def of_length(stored: StoredEngine, num_tokens: int, **sampling: Any) -> AskRequest:
    """A question whose prompt has this many tokens, or a few more."""
    words = list[str]()
    while True:
        words.append(WORDS[len(words) % len(WORDS)])
        question = AskRequest(" ".join(words), (), BlendParams(mode="full"), replace(SAMPLING, **sampling))
        if stored.request(question).plan.num_tokens >= num_tokens:
            return question
