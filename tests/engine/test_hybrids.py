"""Hybrids: the state of recurrent layers is right in batches, slices, branches, after a swap, from the store and from
the prefix cache; and what cannot be exact is computed or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hub_hybrids
import pytest
import torch
from bare_store import bare_writing
from cacheblend_store import ChunkStore, verify
from cacheblend_store.format.blobs import encode_blob
from cacheblend_store.format.keys import blob_key
from cacheblend_store.format.records import layer_spec
from cacheblend_store.tier import SharedTier, open_tier
from checkpoints import WORDS
from engine_driver import ROOMY, SAMPLING, CoreDriver, Listener, StoredEngine, cold, ids_of
from hub_models import HubModel, load_reference

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.sequence import SequenceStatus, provenance_of
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.features.speculation import Speculation
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.worker.memory import warm_up
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.export import check_exportable
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.rank_shard import check_divisible
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SearchParams

FULL = BlendParams(mode="full")


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
    first = driver.answer(question)
    turn = replace(question, history=(question.question, first.text), question="and who keeps a parrot?")
    then = driver.answer(turn)
    assert then.prefix_cache_tokens > first.prompt_tokens - 24
    assert then.generated_ids == cold(each, turn).generated_ids
    again = driver.answer(turn)
    assert again.prefix_cache_tokens >= then.prefix_cache_tokens
    assert again.generated_ids == then.generated_ids


def test_states_are_dropped_with_their_blocks(stored: StoredEngine) -> None:
    """Many prompts in a small pool: whatever the prefix cache finds is right, and few states stay."""
    driver = CoreDriver(stored, replace(ROOMY, pool_tokens=16 * 40))
    questions = [
        replace(ask(stored, f"where does {name} work {i}?"), keys=[stored.keys[i % 9], stored.keys[(i + 1) % 9]])
        for i, name in enumerate(("Mara", "Jonas", "she", "Mara", "the lead", "Jonas") * 4)
    ]  # fmt: skip
    found = [driver.answer(question) for question in questions]
    assert any(a.prefix_cache_tokens for a in found)
    assert [a.generated_ids for a in found] == [cold(stored, q).generated_ids for q in questions]
    pool = driver.core.worker._pool
    assert pool.states is not None
    assert 0 < len(pool.states._of) <= 17
    assert not any(pool.allocator.is_used(block) for block in pool.states._of)


def test_requests_in_any_order_are_those_of_each_alone(stored: StoredEngine) -> None:
    """In a small pool with a prefix cache: some in several answers, some preempted."""
    rng = random.Random(3)
    questions = [
        replace(
            ask(stored, f"where does {rng.choice(('Mara', 'Jonas', 'she'))} work?", max_tokens=rng.randrange(1, 20)),
            keys=stored.keys[(first := rng.choice((0, 0, 3, 5))) : first + rng.randrange(1, 5)],
            history=rng.choice(((), (), ("who is Mara?", "a parrot"))),
            blend=rng.choice((BlendParams(), BlendParams(), FULL)),
        )
        for _ in range(16)
    ]
    questions[::5] = [replace(q, sampling=replace(q.sampling, n=2, temperature=1.0, seed=1)) for q in questions[::5]]
    expected = []
    for question in questions:
        alone = CoreDriver(stored, replace(ROOMY, enable_prefix_caching=False))
        listener, _ = alone.arrive(question)
        alone.run()
        expected.append(ids_of(listener))
    driver = CoreDriver(stored, Limits(pool_tokens=16 * 110, max_rows=16, max_sequences=6))
    listeners = []
    for question in questions:
        listeners.append(driver.arrive(question)[0])
        for _ in range(rng.randrange(8)):
            driver.step()
        decoding = [s for s in driver.core.scheduler.with_status(SequenceStatus.RUNNING) if not s.prefilling]
        if decoding and rng.random() < 0.3:
            driver.core.scheduler.preempt(rng.choice(decoding))
    driver.run()
    assert [ids_of(listener) for listener in listeners] == expected
    assert driver.core.counts.prefix_cached > 0
    assert driver.core.counts.preempted > 0


def damage_state(stored: StoredEngine, key: bytes) -> None:
    manifest = stored.store.undamaged(key)
    assert manifest is not None
    name = blob_key(key, manifest.num_layers)
    with bare_writing(stored.store) as (transaction, databases):
        blob = bytearray(transaction.get(name, db=databases["blobs"]))
        blob[-1] ^= 1
        transaction.put(name, bytes(blob), db=databases["blobs"])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[StoredEngine]:
    stored = open_hybrid(tmp_path, hub_hybrids.QWEN)
    yield stored
    stored.store.close()


def statuses(answer: Answer) -> list[str]:
    return [chunk.status for chunk in answer.chunks]


def test_a_damaged_state_is_computed_and_said_and_stored_again(own: StoredEngine) -> None:
    question, expected = ask(own), cold(own, ask(own))
    damage_state(own, own.keys[1])
    third = own.engine.run_alone(own.store, question, AskOptions(save=False))
    assert third.generated_ids == expected.generated_ids  # the state after a later chunk is right
    last = statuses(expected).count("exact") - 1
    damage_state(own, own.keys[last])
    answer = own.engine.run_alone(own.store, question)
    assert statuses(answer) == ["exact"] * last + ["computed"] * (len(own.keys) - last)
    assert answer.generated_ids == expected.generated_ids
    [said] = answer.notes
    assert own.keys[last].hex()[:12] in said
    assert "digest" in said
    assert statuses(own.engine.run_alone(own.store, question)) == statuses(expected)
    assert not verify(own.store).findings


def test_a_record_with_a_state_of_another_dtype_is_computed_and_said(own: StoredEngine) -> None:
    found = own.store.get_blobs(own.keys[0])
    assert found is not None
    manifest, blobs = found
    other = replace(manifest, state=tuple(("BF16", shape) for _, shape in manifest.state))
    spec = layer_spec(other, other.num_layers)
    forged = encode_blob(spec, {name: bytes(tensor.num_bytes) for name, tensor in spec.items()})
    own.store.put_chunks([(other, [*blobs[:-1], forged])])
    answer = own.engine.run_alone(own.store, replace(ask(own), keys=own.keys[:1]), AskOptions(save=False))
    assert statuses(answer) == ["computed"]
    assert any("no state of this model's recurrent layers in this dtype" in note for note in answer.notes)


def test_slices_that_end_elsewhere_are_other_kv(stored: StoredEngine) -> None:
    """The same tokens, once with a chunk's end among them: they round differently."""

    def slices(*sizes: int) -> tuple[bytes, ...]:
        chunks = [ChunkInput(bytes([n]), "", tuple(range(n)), cached=False) for n in sizes]
        plan = plan_prompt([], chunks, [1] * 40, in_order=True)
        request = SimpleNamespace(plan=plan, collection=SimpleNamespace(salt=""))
        state = SimpleNamespace(request=request, num_prompt_tokens=plan.num_tokens)
        return provenance_of(state, 16).slices  # type: ignore[arg-type]

    one, two = slices(32), slices(20, 12)
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_kv_of_another_dtype_is_computed_and_said(own: StoredEngine) -> None:
    other = Engine.load(EngineConfig(model=str(own.engine.model.path), dtype="bfloat16", block_size=16))
    answer = other.run_alone(own.store, replace(ask(own), keys=own.keys[:2]), AskOptions(save=False))
    assert statuses(answer) == ["computed"] * 2
    assert sum("was computed in float32" in note for note in answer.notes) == 2


def test_its_kv_is_never_used_by_an_attention_model(own: StoredEngine, tmp_path: Path) -> None:
    HubModel("llama").write(tmp_path / "llama")
    other = Engine.load(EngineConfig(model=str(tmp_path / "llama"), block_size=16))
    answer = other.run_alone(own.store, replace(ask(own), keys=own.keys[:2]), AskOptions(save=False))
    assert statuses(answer) == ["computed"] * 2


def test_a_search_begins_with_the_best_document(own: StoredEngine) -> None:
    found = own.engine.search(own.store, AskRequest("Mara", search=SearchParams(k=1)))
    [best] = found.ranks
    manifest = own.store.undamaged(best)
    assert manifest is not None
    assert found.keys[-1] == best
    assert len(found.keys) == manifest.index + 1
    request = own.request(AskRequest("Mara", search=SearchParams(k=1), sampling=SAMPLING))
    assert {chunk.status for chunk in request.plan.chunks} == {"exact"}


def test_states_of_some_chunks_are_enough(own: StoredEngine, tmp_path: Path) -> None:
    """A prompt goes on from the last state that it has."""
    with ChunkStore.open(tmp_path / "sparse", mode="write") as store:
        options = PrecomputeOptions(chunk_tokens=24, state_every=2)
        own.engine.precompute(store, [str(tmp_path / "docs")], options, lambda event: None)
        manifests = [m for key in own.keys if (m := store.undamaged(key)) is not None]
        last = {m.source: m.index for m in manifests}
        assert all(bool(m.state) == (m.index % 2 == 1 or m.index == last[m.source]) for m in manifests)
        assert len({bool(m.state) for m in manifests}) == 2
        sparse, question = replace(own, store=store), replace(ask(own), keys=own.keys[:3])
        answer = own.engine.run_alone(store, question)
        assert statuses(answer) == ["exact", "exact", "computed"]
        assert answer.notes == []  # nothing was damaged, nothing is stored again
        assert torch.equal(logits(sparse, question), logits(own, replace(question, blend=FULL)))
        assert statuses(own.engine.run_alone(store, question)) == ["exact", "exact", "computed"]
        assert not verify(store).findings


def test_a_document_that_lost_a_chunk_is_collected_again_to_the_bit(own: StoredEngine) -> None:
    def digests() -> list[object]:
        return [(m.has_kv, m.blob_digests) for key in own.keys if (m := own.store.undamaged(key)) is not None]

    before = digests()
    own.store.evict_chunks(own.keys[2:4])
    own.engine.precompute(own.store, [str(own.store.path.parent / "docs")], PrecomputeOptions(), lambda event: None)
    assert digests() == before


def test_a_chunk_collected_behind_another_document_is_exact_there(own: StoredEngine) -> None:
    """As a second copy, in context `neighbours`."""
    docs, options = own.store.path.parent / "docs", PrecomputeOptions(context="neighbours", neighbours=1)
    own.engine.precompute(own.store, [str(docs)], options, lambda event: None)
    first = {m.token_ids: m for key in own.keys if (m := own.store.undamaged(key)) and not m.left_context_ids}
    behind = [m for m in own.store.chunks() if m.context == "neighbours"]
    found = next(m for m in behind if m.left_context_ids in first and m.source != first[m.left_context_ids].source)
    question = replace(ask(own), keys=[first[found.left_context_ids].key, found.key])
    assert statuses(own.engine.run_alone(own.store, question)) == ["exact", "exact"]
    assert torch.equal(logits(own, question), logits(own, replace(question, blend=FULL)))


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "ratio": ({"blend": BlendParams(ratio=0.3)}, "no ratio"),
    "selector": ({"blend": BlendParams(selector="hkvd")}, "no ratio"),
    "ratio auto": ({"options": AskOptions(auto=True)}, "no ratio"),
    "reuse": ({"blend": BlendParams(mode="reuse")}, "only at the beginning"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_blending_is_refused(stored: StoredEngine, what: str) -> None:
    change, told = REFUSED[what]
    with pytest.raises(UsageError, match=told):
        stored.request(replace(ask(stored), **change))


def test_reuse_of_what_is_exact_is_possible(stored: StoredEngine) -> None:
    question = replace(ask(stored), keys=stored.keys[:2])
    reused = replace(question, blend=BlendParams(mode="reuse"))
    assert cold(stored, reused).generated_ids == cold(stored, question).generated_ids


def test_what_needs_other_states_is_refused(stored: StoredEngine) -> None:
    runtime = stored.engine.runtime
    with pytest.raises(UsageError, match="recurrent layers"):
        check_exportable(runtime.model.spec, "vLLM")
    with pytest.raises(UsageError, match="--tensor-parallel is not implemented"):
        check_divisible(runtime.model.spec, 2)
    assert Speculation.of(runtime) is None


def test_a_gpu_s_warm_up_runs(each: StoredEngine) -> None:
    """Its prefills are computed from the beginning: nothing may be blended."""
    decoder = each.engine.runtime.decoder
    pool = KVPool.of(decoder, 8, 16)
    warm_up(decoder, pool)
    assert pool.allocator.num_used == 0
    assert pool.states is not None
    assert not pool.states._of


def test_states_come_from_a_tier(own: StoredEngine, tmp_path: Path) -> None:
    said: list[str] = []
    with ChunkStore.open(tmp_path / "shared", mode="write") as store:
        tier = SharedTier(open_tier(f"file://{tmp_path}/tier", None), 60.0, said.append)
        store.share(tier)
        options = PrecomputeOptions(chunk_tokens=24)
        own.engine.precompute(store, [str(tmp_path / "docs")], options, lambda event: None)
        assert tier.flush(60.0) == 0
        question = replace(ask(own), keys=own.keys[:2])
        before = own.engine.run_alone(store, question)
        store.evict_chunks([m.key for m in store.chunks(prefixes=True)])
        answer = own.engine.run_alone(store, question)
        assert statuses(answer) == statuses(before) == ["exact"] * 2
        assert answer.tier is not None
        assert answer.tier.taken == 3  # and the prefix
        assert answer.generated_ids == before.generated_ids
        assert store.has_kv(own.keys[1])
        assert not verify(store).findings
    assert said == []
