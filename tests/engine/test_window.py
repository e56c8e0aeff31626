"""Blocks that no layer looks at any more are others': an answer over a sliding window holds as much of the pool as the
window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from houses import Bench, House, ids_of, open_house

from cacheblend_cli.engine.core.sequence import Status
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.types import BlendParams

WINDOW, SIZE = 24, 16
LIMITS = Limits(pool_tokens=4096, enable_prefix_caching=False)
FULL = BlendParams(mode="full")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("window"), "mistral-window", num_hidden_layers=2) as house:
        yield house


def most_used(bench: Bench) -> int:
    """Blocks while tokens are decoded, the runner's own aside; the jobs are done in the end."""
    most = 0
    while bench.stepper.busy:
        bench.step()
        if all(not s.prefilling for s in bench.stepper.scheduler.those(Status.RUNNING)):
            most = max(most, bench.stepper.blocks.space.allocator.num_used - 1)
    bench.stepper.blocks.check_idle()
    return most


def test_a_long_answer_holds_a_window(house: House) -> None:
    bench, question = Bench(house, LIMITS), house.question(max_tokens=100)
    listener, _ = bench.arrive(question)
    bench.step()  # the prompt, all of it in the pool
    used = most_used(bench)
    assert used <= 1 + -(-WINDOW // SIZE)
    alone = house.engine.run_alone(house.store, question)
    assert ids_of(listener) == [alone.generated_ids]
    assert alone.prompt_tokens > 4 * WINDOW


def test_several_answers_each_leave_the_prompt_behind(house: House) -> None:
    question = house.question(max_tokens=60, temperature=2.0, seed=3, n=3)
    bench = Bench(house, LIMITS)
    listener, _ = bench.arrive(question)
    bench.step()
    assert most_used(bench) <= 3 * (1 + -(-WINDOW // SIZE))
    alone = [Bench(house, LIMITS).ask(house.question(max_tokens=60, temperature=2.0, seed=3 + i))[0] for i in range(3)]
    assert ids_of(listener) == alone


def test_preempted_behind_the_window(house: House) -> None:
    """Swapped out are the blocks that are left."""
    bench = Bench(house, LIMITS)
    questions = [house.question(text, max_tokens=70) for text in ("where does Mara work?", "who?", "what is it about?")]
    listeners = [bench.arrive(question)[0] for question in questions]
    preempted = 0
    while bench.stepper.busy:
        running = [s for s in bench.stepper.scheduler.those(Status.RUNNING) if s.paged is not None and s.paged.gone]
        if running and preempted < 5 and not bench.stepper.scheduler.those(Status.SWAPPED):
            preempted += 1
            bench.stepper.scheduler.preempt(running[-1])
        bench.step()
    bench.stepper.blocks.check_idle()
    assert preempted == 5
    assert [ids_of(listener) for listener in listeners] == [Bench(house, LIMITS).ask(q) for q in questions]


def test_what_was_left_behind_stays_hot(house: House) -> None:
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


def test_a_verified_prompt_is_kept(house: House) -> None:
    bench, question = Bench(house, LIMITS), replace(house.question(max_tokens=70), blend=FULL)
    listener, _ = bench.arrive(question, verify=True)
    bench.run()
    [answer] = listener.done().answers
    assert answer.verify is not None
    assert answer.verify.kl < 1e-6
    assert answer.verify.same_answer


def test_where_a_layer_looks_at_all_nothing_is_given_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_house(tmp_path_factory.mktemp("mixed"), "qwen2-window", pages=1) as house:
        bench = Bench(house, LIMITS)
        bench.arrive(house.question(max_tokens=60))
        bench.step()
        prompt = house.engine.run_alone(house.store, house.question()).prompt_tokens
        assert most_used(bench) >= -(-(prompt + 59) // SIZE)
