"""An idle engine computes the exact KV of what was blended: asked again, it is exact; nobody waits for it, and no block is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest
from houses import WAIT_S, Bench, House, Listener, ids_of, open_house

from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.sequence import Status
from cacheblend_cli.types import Answer, AskRequest, BlendParams

REFINE = Limits(pool_tokens=4096, max_rows=40, refine=True)
FULL = BlendParams(mode="full")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("refine"), num_hidden_layers=2) as house:
        yield house


def answer_of(bench: Bench, question: AskRequest, **options: object) -> Answer:
    listener, _ = bench.arrive(question, **options)
    bench.run()
    [answer] = listener.done().answers
    return answer


def idle(bench: Bench) -> int:
    """Nobody asks until there is nothing left to do. Returns how many steps that took."""
    steps = 0
    while bench.stepper.may_refine:
        bench.step()
        steps += 1
    bench.stepper.blocks.check_idle()
    return steps


def exact(house: House, question: AskRequest) -> list[int]:
    return Bench(house, Limits(enable_prefix_caching=False)).ask(replace(question, blend=FULL))[0]


def test_what_is_asked_again_is_exact(house: House) -> None:
    bench, question = Bench(house, REFINE), house.question()
    first = answer_of(bench, question)
    assert "blended" in [c.status for c in first.chunks]
    assert idle(bench) > 2  # in pieces
    assert bench.stepper.counts.refined == 1
    for text in ("where does Mara work?", "who?"):  # the same question, and another one over the same chunks
        other = replace(question, question=text)
        then = answer_of(bench, other)
        assert {c.status for c in then.chunks} == {"exact"}
        assert then.exact_tokens == then.cached_tokens == sum(c.tokens for c in then.chunks)
        assert then.prefix_cache_tokens >= then.chunks[-1].start + then.chunks[-1].tokens
        assert (then.recomputed_tokens, then.kv_bytes_loaded) == (0, 0)
        assert then.generated_ids == exact(house, other)
    assert idle(bench) == 0  # there is nothing left to refine


def test_chunks_that_end_with_a_block(house: House) -> None:
    """No token of a question stands in their last block."""
    bench, template = Bench(house, REFINE), len(house.engine.runtime.template.prefix_ids)
    sizes = {m.key: len(m.token_ids) for m in house.store.chunks()}
    every = (keys for n in range(2, 5) for keys in permutations(house.keys, n))
    keys = next(keys for keys in every if (template + sum(sizes[key] for key in keys)) % 16 == 0)
    answer_of(bench, replace(house.question(), keys=keys))
    idle(bench)
    again = answer_of(bench, replace(house.question("?"), keys=keys))
    assert {c.status for c in again.chunks} == {"exact"}
    assert (again.chunks[-1].start + again.chunks[-1].tokens) % 16 == 0


def test_what_is_exact_is_not_computed_again(house: House) -> None:
    bench = Bench(house, REFINE)
    answer_of(bench, replace(house.question(), blend=FULL))
    answer_of(bench, replace(house.question(), keys=house.keys[:1]))
    assert not bench.stepper.may_refine
    assert not Bench(house, replace(REFINE, enable_prefix_caching=False)).stepper.may_refine


def test_who_comes_waits_for_a_piece_at_most(house: House) -> None:
    bench, question = Bench(house, REFINE), house.question()
    answer_of(bench, question)
    bench.step()  # a piece
    computed = bench.stepper.blocks.space.allocator.num_cached
    other = replace(house.question("who keeps a parrot?"), keys=house.keys[::-1])
    listener, _ = bench.arrive(other)
    bench.step()
    assert bench.stepper.scheduler.those(Status.RUNNING)  # its prompt is what the step was for
    bench.run()
    listener.done()
    assert bench.stepper.blocks.space.allocator.num_cached > computed
    idle(bench)
    assert bench.stepper.counts.refined == 2
    assert {c.status for c in answer_of(bench, other).chunks} == {"exact"}
    assert {c.status for c in answer_of(bench, question).chunks} == {"exact"}


def test_a_pool_that_is_too_small_for_it_loses_nothing(house: House) -> None:
    bench = Bench(house, replace(REFINE, pool_tokens=16 * 22))
    questions = [
        replace(house.question(), keys=[house.keys[i], *house.keys[:i], *house.keys[i + 1 :]]) for i in range(6)
    ]
    for _ in range(2):
        for question in questions:
            answer_of(bench, question)
            bench.step()
        idle(bench)
    assert bench.stepper.counts.failed == 0
    assert bench.stepper.counts.refined > 0


def test_a_confirmed_answer_leaves_exact_kv(house: House) -> None:
    bench, question = Bench(house, REFINE), house.question(max_tokens=20)
    first = answer_of(bench, question, confirm=True)
    assert first.confirmation is not None
    before = bench.stepper.blocks.space.allocator.num_cached
    then = answer_of(bench, replace(question, question="who?"))  # before there was time to refine
    assert {c.status for c in then.chunks} == {"exact"}
    assert then.generated_ids == exact(house, replace(question, question="who?"))
    assert bench.stepper.blocks.space.allocator.num_cached >= before
    again = answer_of(bench, question)
    assert again.generated_ids == first.generated_ids
    plain = Bench(house, replace(REFINE, refine=False))
    answer_of(plain, question, confirm=True)
    assert "blended" in [c.status for c in answer_of(plain, question).chunks]


def test_a_service_refines_by_itself_and_ends_when_it_is_closed(house: House) -> None:
    service, question = AsyncEngine(house.engine.runtime, REFINE), house.question()
    for keys in (house.keys, house.keys[::-1]):
        listener = Listener()
        service.submit(house.request(replace(question, keys=keys), save=False), listener)
        listener.done()
    for _ in range(200):
        if service.run(lambda runtime: service.stats().refined).result(WAIT_S) == 2:
            break
    assert service.stats().refined == 2
    listener = Listener()
    service.submit(house.request(question, save=False), listener)
    [answer] = listener.done().answers
    assert {c.status for c in answer.chunks} == {"exact"}
    assert ids_of(listener) == [exact(house, question)]
    service.close()
