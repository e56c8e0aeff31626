"""Hybrids: the state of recurrent layers is right in batches, slices, branches, after a swap, from the store and from the
prefix cache; and what cannot be exact is computed or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import hub_hybrids
import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS
from engine_driver import SAMPLING, CoreDriver, Listener, StoredEngine, ids_of
from hub_models import HubModel, load_reference

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.types import Answer, AskRequest, BlendParams

FULL = BlendParams(mode="full")
ROOMY = Limits(pool_tokens=4096, max_rows=16)


def open_hybrid(base: Path, model: HubModel, pages: int = 3, dtype: str = "float32") -> StoredEngine:
    """A random model, and documents of three chunks of up to 24 tokens each."""
    model.write(base / "model")
    (base / "docs").mkdir()
    for page in range(pages):
        words = [WORDS[(5 * page + i) % len(WORDS)] for i in range(60)]
        (base / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
    store = ChunkStore.open(base / "store", mode="write")
    engine = Engine.load(EngineConfig(model=str(base / "model"), dtype=dtype, block_size=16))
    engine.precompute(store, [str(base / "docs")], PrecomputeOptions(chunk_tokens=24), lambda event: None)
    return StoredEngine(engine, store, in_order(store))


def in_order(store: ChunkStore) -> list[bytes]:
    return [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index)) if m.context != "prefix"]


@pytest.fixture(scope="module", params=hub_hybrids.RUN, ids=lambda model: model.name)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with ExitStack() as stack:
        stored = open_hybrid(tmp_path_factory.mktemp("hybrid"), request.param)
        stack.callback(stored.store.close)
        yield stored


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    stored = open_hybrid(tmp_path_factory.mktemp("qwen"), hub_hybrids.QWEN)
    yield stored
    stored.store.close()


def ask(stored: StoredEngine, text: str = "where does Mara work?", **sampling: object) -> AskRequest:
    return AskRequest(text, stored.keys, BlendParams(), replace(SAMPLING, **sampling))


def answer_of(driver: CoreDriver, question: AskRequest) -> Answer:
    listener, _ = driver.arrive(question)
    driver.run()
    ids_of(listener)
    return listener.done().answers[0]


def cold(stored: StoredEngine, question: AskRequest) -> Answer:
    return answer_of(CoreDriver(stored, replace(ROOMY, enable_prefix_caching=False)), question)


def logits(stored: StoredEngine, question: AskRequest) -> torch.Tensor:
    done = prefill(stored.engine.runtime, stored.request(question))
    done.sequence.release()
    return done.result.logits


def test_answers_are_those_of_transformers(each: StoredEngine) -> None:
    """In one pass over the prompt and the answer: its own `generate` rounds differently in its cache."""
    answer = cold(each, replace(ask(each, max_tokens=20), blend=FULL))
    model, first = load_reference(each.engine.model.path), len(answer.prompt_ids) - 1
    with torch.no_grad():
        theirs = model(torch.tensor([answer.prompt_ids + answer.generated_ids])).logits[0, first:-1]
    assert answer.generated_ids == theirs.argmax(-1).tolist()
    ours = logits(each, replace(ask(each), blend=FULL))[0]
    assert float((ours - theirs[0]).abs().max()) < 1e-4 * max(1.0, float(theirs[0].abs().max()))


def test_a_restored_prompt_is_a_full_prefill_to_the_bit(each: StoredEngine) -> None:
    question = ask(each)
    plan = each.request(question).plan
    first = [m.key for m in map(each.store.undamaged, each.keys) if m and m.source.endswith("0.md")]
    assert [s.key for s in plan.segments if s.status == "exact"] == [plan.segments[0].key, *first]
    assert {s.status for s in plan.segments[1 + len(first) :]} == {"computed"}
    assert torch.equal(logits(each, question), logits(each, replace(question, blend=FULL)))
    assert cold(each, question).generated_ids == cold(each, replace(question, blend=FULL)).generated_ids


def test_a_batch_answers_as_each_alone(each: StoredEngine) -> None:
    """Prompts and answers of different lengths, in slices of 16."""
    questions = [
        ask(each, max_tokens=12),
        replace(ask(each, "who keeps a parrot at home and why?", max_tokens=7), keys=each.keys[3:6]),
        replace(ask(each, "?", max_tokens=9), keys=[]),
        replace(ask(each, temperature=1.0, seed=5, max_tokens=8), keys=each.keys[:2]),
        replace(ask(each, "and then?", max_tokens=5), keys=each.keys[6:]),
    ]
    driver = CoreDriver(each, replace(ROOMY, enable_prefix_caching=False))
    listeners = [driver.arrive(question)[0] for question in questions]
    driver.run()
    found = [listener.done().answers[0].generated_ids for listener in listeners]
    assert found == [cold(each, question).generated_ids for question in questions]


def test_several_answers_branch_from_one_state(stored: StoredEngine) -> None:
    question = ask(stored, n=5, temperature=1.0, seed=3, max_tokens=24)
    driver = CoreDriver(stored, ROOMY)
    listener, _ = driver.arrive(question)
    driver.run()
    found = [answer.generated_ids for answer in listener.done().answers]
    alone = [cold(stored, replace(ask(stored, temperature=1.0, seed=3 + i, max_tokens=24))) for i in range(5)]
    assert found == [answer.generated_ids for answer in alone]
    assert len({tuple(ids) for ids in found}) > 1


def test_a_swapped_answer_goes_on(each: StoredEngine) -> None:
    """States leave the pool with their blocks, and come back with them."""
    questions = [ask(each, f"where does {name} work?", max_tokens=30) for name in ("Mara", "Jonas", "she", "the lead")]
    driver, rng = CoreDriver(each, replace(ROOMY, enable_prefix_caching=False)), random.Random(0)
    listeners: list[Listener] = [driver.arrive(question)[0] for question in questions]
    scheduler = driver.core.scheduler
    while driver.core.busy:
        driver.step()
        decoding = [s for s in scheduler.with_status(SequenceStatus.RUNNING) if not s.prefilling]
        if decoding and rng.random() < 0.2:
            scheduler.preempt(rng.choice(decoding))
    assert driver.core.counts.preempted > 3 > driver.core.counts.recomputed
    found = [listener.done().answers[0].generated_ids for listener in listeners]
    assert found == [cold(each, question).generated_ids for question in questions]


def test_the_next_turn_of_a_chat_goes_on_from_a_state(each: StoredEngine) -> None:
    driver, question = CoreDriver(each, ROOMY), ask(each)
    first = answer_of(driver, question)
    turn = replace(question, history=(question.question, first.text), question="and who keeps a parrot?")
    then = answer_of(driver, turn)
    assert then.prefix_cache_tokens > first.prompt_tokens - 24
    assert then.generated_ids == cold(each, turn).generated_ids
    again = answer_of(driver, turn)
    assert again.prefix_cache_tokens >= then.prefix_cache_tokens
    assert again.generated_ids == then.generated_ids


def test_states_are_dropped_with_their_blocks(stored: StoredEngine) -> None:
    """Many prompts in a small pool: whatever the prefix cache finds is right, and no more states stay than it may keep."""
    driver = CoreDriver(stored, replace(ROOMY, pool_tokens=16 * 40))
    questions = [
        replace(ask(stored, f"where does {name} work {i}?"), keys=[stored.keys[i % 9], stored.keys[(i + 1) % 9]])
        for i, name in enumerate(("Mara", "Jonas", "she", "Mara", "the lead", "Jonas") * 4)
    ]  # fmt: skip
    found = [answer_of(driver, question) for question in questions]
    assert any(a.prefix_cache_tokens for a in found)
    assert [a.generated_ids for a in found] == [cold(stored, q).generated_ids for q in questions]
    pool = driver.core.worker._pool
    assert pool.states is not None
    assert 0 < len(pool.states._of) <= 17
    assert not any(pool.allocator.is_used(block) for block in pool.states._of)
