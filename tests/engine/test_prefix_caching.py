"""Prefix cache: a later prompt with the same beginning computes only its new part, and blended KV is never reused as
exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_driver import ROOMY, SAMPLING, CoreDriver, StoredEngine, cold, ids_of, open_stored_engine

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams

FULL, BLEND = BlendParams(mode="full"), BlendParams(ratio=0.3)
LONG = "where does Mara work and who keeps a parrot at home? " * 12


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("prefix"), num_hidden_layers=2) as stored:
        yield stored


def test_a_prompt_that_was_asked_before_computes_its_end(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(), blend=FULL)
    first, again = driver.answer(question), driver.answer(question)
    assert first.prefix_cache_tokens == 0
    assert first.prompt_tokens - 16 <= again.prefix_cache_tokens < first.prompt_tokens
    assert again.generated_ids == first.generated_ids == cold(stored, question).generated_ids
    assert "prefix_cache_tokens" not in first.to_dict()
    assert again.to_dict()["prefix_cache_tokens"] == again.prefix_cache_tokens


def test_the_next_turn_of_a_chat_computes_what_is_new(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(), blend=FULL)
    first = driver.answer(question)
    turn = replace(question, history=(question.question, first.text), question="and who keeps a parrot?")
    then = driver.answer(turn)
    assert then.prefix_cache_tokens > first.prompt_tokens - 16
    assert then.generated_ids == cold(stored, turn).generated_ids


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q,
        lambda q: replace(q, blend=FULL),
        lambda q: replace(q, blend=BlendParams(ratio=0.31)),
        lambda q: replace(q, blend=BlendParams(mode="reuse")),
        lambda q: replace(q, keys=[*q.keys[:3], q.keys[4], q.keys[3]]),
        lambda q: replace(q, keys=q.keys[:4]),
    ],
    ids=["the same", "full", "another ratio", "reuse", "another order", "fewer chunks"],
)
def test_blended_kv_is_never_reused(stored: StoredEngine, change: object) -> None:
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(), blend=BLEND, keys=stored.keys[:5])
    first = driver.answer(question)
    assert first.exact_tokens < first.cached_tokens
    other = change(question)  # type: ignore[operator]
    then, alone = driver.answer(other), cold(stored, other)
    assert then.prefix_cache_tokens <= first.chunks[1].start  # prefix and first chunk
    assert then.generated_ids == alone.generated_ids
    assert then.recomputed_tokens == alone.recomputed_tokens


def test_tenants_share_nothing(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, ROOMY), AskRequest("Mara works in Bergen " * 20, [], FULL, SAMPLING)
    driver.answer(question)
    assert driver.answer(replace(question, salt="b")).prefix_cache_tokens == 0
    assert driver.answer(question).prefix_cache_tokens > 0


def test_cached_blocks_are_evicted_for_new_prompts(stored: StoredEngine) -> None:
    """The least recently used goes first, and answers stay right while everything is thrown out all the time."""
    driver = CoreDriver(stored, replace(ROOMY, pool_tokens=16 * 30))
    questions = [
        replace(stored.question(f"where does {name} work {i}?"), blend=FULL, keys=[stored.keys[i % 6], stored.keys[(i + 1) % 6]])
        for i, name in enumerate(("Mara", "Jonas", "she", "Mara", "the lead", "Jonas") * 3)
    ]  # fmt: skip
    found = [driver.answer(question) for question in questions]
    assert any(a.prefix_cache_tokens for a in found)
    assert not all(a.prefix_cache_tokens for a in found)
    assert [a.generated_ids for a in found] == [cold(stored, q).generated_ids for q in questions]


def test_a_new_prompt_shares_blocks_of_a_running_one(stored: StoredEngine) -> None:
    """Two requests with the same prompt share its full blocks."""
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(max_tokens=40), blend=FULL)
    first, _ = driver.arrive(question)
    while not first.text():
        driver.step()
    used = driver.core.blocks.space.allocator.num_used
    second, _ = driver.arrive(question)
    while not second.text():
        driver.step()
    assert driver.core.blocks.space.allocator.num_used <= used + 4
    driver.run()
    assert ids_of(first) == ids_of(second)


def test_verify_does_not_change_cached_kv(stored: StoredEngine) -> None:
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(), blend=FULL)
    listener, _ = driver.arrive(question, verify=True)
    driver.run()
    [answer] = listener.done().answers
    assert answer.verify is not None
    assert answer.verify.kl < 1e-6
    assert driver.answer(question).generated_ids == answer.generated_ids


def test_a_partly_cached_chunk_is_reported_once(stored: StoredEngine) -> None:
    """A prefix-cache hit that ends within a computed chunk is reported once."""
    driver, question = CoreDriver(stored, ROOMY), replace(stored.question(), blend=FULL)
    driver.answer(replace(question, keys=[*stored.keys[:2], stored.keys[3]]))
    then = driver.answer(question)
    assert stored.engine.run_alone(stored.store, question).prompt_tokens > then.prefix_cache_tokens > 16
    assert [c.tokens for c in then.chunks] == [c.tokens for c in cold(stored, question).chunks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_again_alone_and_together_are_the_same_to_the_bit(stored: StoredEngine, dtype: str) -> None:
    """Blended, in full and without chunks; what is found are whole slices."""
    config = replace(stored.engine.config, dtype=dtype)
    other = replace(stored, engine=Engine.load(config))
    asked = [
        replace(other.question(LONG + end, logprobs=2), blend=blend, keys=keys)
        for end in ("who?", "what?") for blend in (FULL, BLEND) for keys in ([], stored.keys[:3])
    ]  # fmt: skip
    alone = [other.engine.run_alone(other.store, question) for question in asked]
    driver = CoreDriver(other, Limits(pool_tokens=8192))
    first, again = ([driver.answer(question) for question in asked] for _ in range(2))
    together = [driver.arrive(question)[0] for question in [*asked, *asked]]
    driver.run()
    batch = [listener.done().answers[0] for listener in together]
    for found in (first, again, batch[: len(asked)], batch[len(asked) :]):
        assert [a.generated_ids for a in found] == [a.generated_ids for a in alone]
        assert [a.logprobs for a in found] == [a.logprobs for a in alone]
    assert {a.prefix_cache_tokens for a in again} == {0, 256}


def test_a_verified_answer_that_is_replaced_is_of_its_blended_kv(stored: StoredEngine) -> None:
    """Replacing the answer does not hide how far the blended KV was."""
    question = replace(stored.question(), blend=BlendParams(mode="reuse"))
    full = stored.engine.run_alone(stored.store, replace(question, blend=FULL))
    plain = stored.engine.run_alone(stored.store, question, AskOptions(verify=True)).verify
    alone = stored.engine.run_alone(stored.store, question, AskOptions(verify=True, confirm=True))
    for answer in (alone, verified(CoreDriver(stored, ROOMY), question, confirm=True)):
        assert answer.generated_ids == full.generated_ids
        assert answer.confirmation is not None
        assert answer.verify is not None
        assert plain is not None
        assert answer.verify.kl == plain.kl > 1e-4


def verified(driver: CoreDriver, question: AskRequest, *, confirm: bool = False) -> Answer:
    listener, _ = driver.arrive(question, verify=True, confirm=confirm)
    driver.run()
    return listener.done().answers[0]


def test_verify_does_not_block_other_answers(stored: StoredEngine) -> None:
    """Another answer gets a token between any two steps of the check."""
    driver = CoreDriver(stored, Limits(pool_tokens=4096, max_rows=16))
    other, state = driver.arrive(stored.question("who?", max_tokens=80))
    while not other.events or not state.num_started:
        driver.step()
    checked, _ = driver.arrive(stored.question(), verify=True)
    while not any(s.parent for s in driver.core.scheduler.states):
        driver.step()
    output = state.sequences[0].output
    assert output is not None
    before = len(output.out.token_ids)
    while not checked.last.done():
        driver.step()
    [answer] = checked.done().answers
    assert answer.verify is not None
    assert len(output.out.token_ids) - before >= answer.prompt_tokens // 16, "one for each slice of the full prefill"
    driver.run()


def test_a_check_ends_with_its_request(stored: StoredEngine) -> None:
    for option in ("verify", "confirm"):
        driver = CoreDriver(stored, ROOMY)
        listener, state = driver.arrive(stored.question(), **{option: True})
        while not any(s.parent for s in driver.core.scheduler.states):
            driver.step()
        state.cancelled = True
        driver.run()
        assert listener.done().ended == "cancelled"
        assert listener.done().answers[0].generated_ids


def test_a_check_in_a_pool_for_one_takes_turns(stored: StoredEngine) -> None:
    roomy = verified(CoreDriver(stored, ROOMY), stored.question())
    tight = verified(CoreDriver(stored, Limits(pool_tokens=roomy.prompt_tokens + 6 + 32)), stored.question())
    assert tight.verify is not None
    assert roomy.verify is not None
    assert tight.verify.kl == roomy.verify.kl
    assert tight.verify.answer_tokens == roomy.verify.answer_tokens == 6
