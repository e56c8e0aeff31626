"""Blocks outside every layer's window are freed: an answer with a sliding window holds as much of the pool as the
window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_driver import CoreDriver, StoredEngine, ids_of, open_stored_engine

from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.types import BlendParams

WINDOW, SIZE = 24, 16
LIMITS = Limits(pool_tokens=4096, enable_prefix_caching=False)
FULL = BlendParams(mode="full")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("window"), "mistral-window", num_hidden_layers=2) as stored:
        yield stored


def most_used(driver: CoreDriver) -> int:
    """Blocks while tokens are decoded, the runner's own aside; the jobs are done in the end."""
    most = 0
    while driver.core.busy:
        driver.step()
        if all(not s.prefilling for s in driver.core.scheduler.with_status(SequenceStatus.RUNNING)):
            most = max(most, driver.core.blocks.space.allocator.num_used - 1)
    driver.core.blocks.check_idle()
    return most


def test_a_long_answer_holds_a_window(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, LIMITS), stored.question(max_tokens=100)
    listener, _ = driver.arrive(question)
    driver.step()  # the prompt, all of it in the pool
    used = most_used(driver)
    assert used <= 1 + -(-WINDOW // SIZE)
    alone = stored.engine.run_alone(stored.store, question)
    assert ids_of(listener) == [alone.generated_ids]
    assert alone.prompt_tokens > 4 * WINDOW


def test_several_answers_each_leave_the_prompt_behind(stored: StoredEngine) -> None:
    question = stored.question(max_tokens=60, temperature=2.0, seed=3, n=3)
    driver = CoreDriver(stored, LIMITS)
    listener, _ = driver.arrive(question)
    driver.step()
    assert most_used(driver) <= 3 * (1 + -(-WINDOW // SIZE))
    alone = [
        CoreDriver(stored, LIMITS).ask(stored.question(max_tokens=60, temperature=2.0, seed=3 + i))[0] for i in range(3)
    ]
    assert ids_of(listener) == alone


def test_a_preempted_answer_resumes_outside_the_window(stored: StoredEngine) -> None:
    """Swapped out are the blocks that are left."""
    driver = CoreDriver(stored, LIMITS)
    questions = [
        stored.question(text, max_tokens=70) for text in ("where does Mara work?", "who?", "what is it about?")
    ]
    listeners = [driver.arrive(question)[0] for question in questions]
    preempted = 0
    while driver.core.busy:
        running = [
            s
            for s in driver.core.scheduler.with_status(SequenceStatus.RUNNING)
            if s.paged is not None and s.paged.num_freed_blocks
        ]
        if running and preempted < 5 and not driver.core.scheduler.with_status(SequenceStatus.SWAPPED):
            preempted += 1
            driver.core.scheduler.preempt(running[-1])
        driver.step()
    driver.core.blocks.check_idle()
    assert preempted == 5
    assert [ids_of(listener) for listener in listeners] == [CoreDriver(stored, LIMITS).ask(q) for q in questions]


def test_blocks_outside_the_window_stay_cached(stored: StoredEngine) -> None:
    driver, question = (
        CoreDriver(stored, replace(LIMITS, enable_prefix_caching=True)),
        replace(stored.question(max_tokens=70), blend=FULL),
    )
    first = driver.ask(question)
    listener, _ = driver.arrive(question)
    driver.run()
    [answer] = listener.done().answers
    assert answer.prefix_cache_tokens > 4 * WINDOW
    assert [answer.generated_ids] == first


def test_a_verified_prompt_is_kept(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, LIMITS), replace(stored.question(max_tokens=70), blend=FULL)
    listener, _ = driver.arrive(question, verify=True)
    driver.run()
    [answer] = listener.done().answers
    assert answer.verify is not None
    assert answer.verify.kl < 1e-6
    assert answer.verify.same_answer


def test_where_a_layer_looks_at_all_nothing_is_given_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_stored_engine(tmp_path_factory.mktemp("mixed"), "qwen2-window", pages=1) as stored:
        driver = CoreDriver(stored, LIMITS)
        driver.arrive(stored.question(max_tokens=60))
        driver.step()
        prompt = stored.engine.run_alone(stored.store, stored.question()).prompt_tokens
        assert most_used(driver) >= -(-(prompt + 59) // SIZE)
