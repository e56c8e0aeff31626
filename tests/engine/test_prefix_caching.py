"""KV that stays in the pool after its answer: who asks the like of it computes what is new alone, and blended KV is
never taken for exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from houses import SAMPLING, Bench, House, ids_of, open_house

from cacheblend_cli.engine.core.full_check import Check
from cacheblend_cli.engine.core.risk import SIGNALS, RiskFile, RiskFit
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams

FULL, BLEND = BlendParams(mode="full"), BlendParams(ratio=0.3)
ROOMY = Limits(pool_tokens=4096, max_rows=16)
LONG = "where does Mara work and who keeps a parrot at home? " * 12


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("prefix"), num_hidden_layers=2) as house:
        yield house


def answer_of(bench: Bench, question: AskRequest) -> Answer:
    listener, _ = bench.arrive(question)
    bench.run()
    ids_of(listener)
    return listener.done().answers[0]


def cold(house: House, question: AskRequest) -> Answer:
    return answer_of(Bench(house, replace(ROOMY, enable_prefix_caching=False)), question)


def test_a_prompt_that_was_asked_before_computes_its_end(house: House) -> None:
    bench, question = Bench(house, ROOMY), replace(house.question(), blend=FULL)
    first, again = answer_of(bench, question), answer_of(bench, question)
    assert first.prefix_cache_tokens == 0
    assert first.prompt_tokens - 16 <= again.prefix_cache_tokens < first.prompt_tokens
    assert again.generated_ids == first.generated_ids == cold(house, question).generated_ids
    assert "prefix_cache_tokens" not in first.to_dict()
    assert again.to_dict()["prefix_cache_tokens"] == again.prefix_cache_tokens


def test_the_next_turn_of_a_chat_computes_what_is_new(house: House) -> None:
    bench, question = Bench(house, ROOMY), replace(house.question(), blend=FULL)
    first = answer_of(bench, question)
    turn = replace(question, history=(question.question, first.text), question="and who keeps a parrot?")
    then = answer_of(bench, turn)
    assert then.prefix_cache_tokens > first.prompt_tokens - 16
    assert then.generated_ids == cold(house, turn).generated_ids


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
def test_blended_kv_is_never_reused(house: House, change: object) -> None:
    bench, question = Bench(house, ROOMY), replace(house.question(), blend=BLEND, keys=house.keys[:5])
    first = answer_of(bench, question)
    assert first.exact_tokens < first.cached_tokens
    other = change(question)  # type: ignore[operator]
    then, alone = answer_of(bench, other), cold(house, other)
    assert then.prefix_cache_tokens <= first.chunks[1].start  # prefix and first chunk
    assert then.generated_ids == alone.generated_ids
    assert then.recomputed_tokens == alone.recomputed_tokens


def test_tenants_share_nothing(house: House) -> None:
    bench, question = Bench(house, ROOMY), AskRequest("Mara works in Bergen " * 20, [], FULL, SAMPLING)
    answer_of(bench, question)
    assert answer_of(bench, replace(question, salt="b")).prefix_cache_tokens == 0
    assert answer_of(bench, question).prefix_cache_tokens > 0


def test_what_is_hot_makes_room(house: House) -> None:
    """The least recently used goes first, and answers stay right while everything is thrown out all the time."""
    bench = Bench(house, replace(ROOMY, pool_tokens=16 * 30))
    questions = [
        replace(house.question(f"where does {name} work {i}?"), blend=FULL, keys=[house.keys[i % 6], house.keys[(i + 1) % 6]])
        for i, name in enumerate(("Mara", "Jonas", "she", "Mara", "the lead", "Jonas") * 3)
    ]  # fmt: skip
    found = [answer_of(bench, question) for question in questions]
    assert any(a.prefix_cache_tokens for a in found)
    assert not all(a.prefix_cache_tokens for a in found)
    assert [a.generated_ids for a in found] == [cold(house, q).generated_ids for q in questions]


def test_who_runs_shares_with_who_comes(house: House) -> None:
    """Two of the same prompt at once hold its full blocks once."""
    bench, question = Bench(house, ROOMY), replace(house.question(max_tokens=40), blend=FULL)
    first, _ = bench.arrive(question)
    while not first.events[1:]:
        bench.step()
    used = bench.stepper.blocks.space.allocator.num_used
    second, _ = bench.arrive(question)
    while not second.events[1:]:
        bench.step()
    assert bench.stepper.blocks.space.allocator.num_used <= used + 4
    bench.run()
    assert ids_of(first) == ids_of(second)


def test_a_verified_answer_leaves_hot_kv_as_it_was(house: House) -> None:
    bench, question = Bench(house, ROOMY), replace(house.question(), blend=FULL)
    listener, _ = bench.arrive(question, verify=True)
    bench.run()
    [answer] = listener.done().answers
    assert answer.verify is not None
    assert answer.verify.kl < 1e-6
    assert answer_of(bench, question).generated_ids == answer.generated_ids


def test_a_chunk_that_is_hot_in_part_is_one_chunk(house: House) -> None:
    """A prefix-cache hit that ends within a computed chunk is reported once."""
    bench, question = Bench(house, ROOMY), replace(house.question(), blend=FULL)
    answer_of(bench, replace(question, keys=[*house.keys[:2], house.keys[3]]))
    then = answer_of(bench, question)
    assert house.engine.run_alone(house.store, question).prompt_tokens > then.prefix_cache_tokens > 16
    assert [c.tokens for c in then.chunks] == [c.tokens for c in cold(house, question).chunks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_again_alone_and_together_are_the_same_to_the_bit(house: House, dtype: str) -> None:
    """Blended, in full and without chunks; what is found are whole slices."""
    config = replace(house.engine.config, dtype=dtype)
    other = replace(house, engine=Engine.load(config))
    asked = [
        replace(other.question(LONG + end, logprobs=2), blend=blend, keys=keys)
        for end in ("who?", "what?") for blend in (FULL, BLEND) for keys in ([], house.keys[:3])
    ]  # fmt: skip
    alone = [other.engine.run_alone(other.store, question) for question in asked]
    bench = Bench(other, Limits(pool_tokens=8192))
    first, again = ([answer_of(bench, question) for question in asked] for _ in range(2))
    together = [bench.arrive(question)[0] for question in [*asked, *asked]]
    bench.run()
    batch = [listener.done().answers[0] for listener in together]
    for found in (first, again, batch[: len(asked)], batch[len(asked) :]):
        assert [a.generated_ids for a in found] == [a.generated_ids for a in alone]
        assert [a.logprobs for a in found] == [a.logprobs for a in alone]
    assert {a.prefix_cache_tokens for a in again} == {0, 256}


def test_a_verified_answer_beside_a_gate_is_of_its_blended_kv(house: House) -> None:
    """A full prefill that goes on before the first token does not hide how far the blended KV was."""
    question = replace(house.question(), blend=BlendParams(mode="reuse"))
    RiskFile.of(house.engine.runtime.collection(), ["sink"], question.blend).write(
        RiskFit((0.0,) * SIGNALS, 0.0, 9, 9, 9)
    )
    gated = replace(question, blend=replace(question.blend, max_risk=0.0))
    whole = AskOptions(verify=True, stream=False)
    plain = house.engine.run_alone(house.store, question, AskOptions(verify=True)).verify
    for answer in (
        house.engine.run_alone(house.store, gated, whole),
        verified(Bench(house, ROOMY), gated),
    ):
        assert answer.risk is not None
        assert answer.risk.full_prefill_at == 0
        assert answer.verify is not None
        assert plain is not None
        assert answer.verify.kl == plain.kl > 1e-4


def verified(bench: Bench, question: AskRequest) -> Answer:
    listener, _ = bench.arrive(question, verify=True, stream=False)
    bench.run()
    return listener.done().answers[0]


def test_a_verified_answer_holds_nobody_up(house: House) -> None:
    """Another answer gets a token between any two steps of the check."""
    bench = Bench(house, Limits(pool_tokens=4096, max_rows=16))
    other, state = bench.arrive(house.question("who?", max_tokens=80))
    while not other.events or not state.num_started:
        bench.step()
    checked, _ = bench.arrive(house.question(), verify=True)
    while not any(isinstance(s, Check) for s in bench.stepper.scheduler.states):
        bench.step()
    output = state.sequences[0].output
    assert output is not None
    before = len(output.out.token_ids)
    while not checked.last.done():
        bench.step()
    [answer] = checked.done().answers
    assert answer.verify is not None
    assert len(output.out.token_ids) - before >= answer.prompt_tokens // 16, "one for each slice of the full prefill"
    bench.run()


def test_a_check_ends_with_its_request(house: House) -> None:
    for option in ("verify", "confirm"):
        bench = Bench(house, ROOMY)
        listener, state = bench.arrive(house.question(), **{option: True})
        while not any(isinstance(s, Check) for s in bench.stepper.scheduler.states):
            bench.step()
        state.cancelled = True
        bench.run()
        assert listener.done().ended == "cancelled"
        assert listener.done().answers[0].generated_ids


def test_a_check_in_a_pool_for_one_takes_turns(house: House) -> None:
    roomy = verified(Bench(house, ROOMY), house.question())
    tight = verified(Bench(house, Limits(pool_tokens=roomy.prompt_tokens + 6 + 32)), house.question())
    assert tight.verify is not None
    assert roomy.verify is not None
    assert tight.verify.kl == roomy.verify.kl
    assert tight.verify.answer_tokens == roomy.verify.answer_tokens == 6
