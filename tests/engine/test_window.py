"""Answers of a model whose every layer has a sliding window, longer than the window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from houses import Bench, House, ids_of, open_house

from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.sequence import Status
from cacheblend_cli.types import BlendParams

WINDOW = 24
LIMITS = Limits(pool_tokens=4096, enable_prefix_caching=False)
FULL = BlendParams(mode="full")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("window"), "mistral-window", num_hidden_layers=2) as house:
        yield house


def test_preempted_behind_the_window(house: House) -> None:
    bench = Bench(house, LIMITS)
    questions = [house.question(text, max_tokens=70) for text in ("where does Mara work?", "who?", "what is it about?")]
    listeners = [bench.arrive(question)[0] for question in questions]
    preempted = 0
    while bench.stepper.busy:
        running = bench.stepper.scheduler.those(Status.RUNNING)
        behind = [s for s in running if s.output is not None and len(s.output.out.token_ids) > WINDOW]
        if behind and preempted < 5 and not bench.stepper.scheduler.those(Status.SWAPPED):
            preempted += 1
            bench.stepper.scheduler.preempt(behind[-1])
        bench.step()
    bench.stepper.blocks.check_idle()
    assert preempted == 5
    assert [ids_of(listener) for listener in listeners] == [Bench(house, LIMITS).ask(q) for q in questions]


def test_a_prompt_longer_than_the_window_is_found_in_the_prefix_cache(house: House) -> None:
    bench, question = (
        Bench(house, replace(LIMITS, enable_prefix_caching=True)),
        replace(house.question(max_tokens=70), blend=FULL),
    )
    first = bench.ask(question)
    listener, _ = bench.arrive(question)
    bench.run()
    [answer] = listener.done().answers
    assert answer.prefix_cache_tokens > 4 * WINDOW
    assert [answer.generated_ids] == first


def test_a_prompt_longer_than_the_window_is_verified(house: House) -> None:
    bench, question = Bench(house, LIMITS), replace(house.question(max_tokens=70), blend=FULL)
    listener, _ = bench.arrive(question, verify=True)
    bench.run()
    [answer] = listener.done().answers
    assert answer.verify is not None
    assert answer.verify.kl < 1e-6
    assert answer.verify.same_answer
