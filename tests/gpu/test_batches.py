"""Several questions at once on a fake GPU: batches, preemption and the prefix cache change no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from engine_driver import CoreDriver, Listener, StoredEngine, ids_of
from fake_gpu import FakeGpu
from gpu_engine import Setup, check_waits, engine_gpu, use_pool
from held_store import HeldStore

from cacheblend_cli.engine.core.sequence import RequestState, SequenceStatus
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.kv import layer_graphs
from cacheblend_cli.kv.cuda_loader import CudaLoader
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

ALLOWED_WAITS = {"layers": 0, "decode": 0}
"""Phase -> synchronisations and pageable copies, whatever is in the batch."""
LIMITS = Limits(max_sequences=6, max_rows=48, enable_prefix_caching=False, pool_tokens=4096)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@contextmanager
def engines(
    path: Path, family: str = "llama-gqa", **settings: object
) -> Iterator[tuple[FakeGpu, StoredEngine, StoredEngine]]:
    """An engine on a fake GPU and one on the CPU over one store."""
    setup = Setup.write(path, family, model={"num_hidden_layers": 3}, **settings)
    with setup.store() as store:
        cpu = setup.engine("cpu")
        keys = setup.precompute(cpu, store)
        with engine_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_graphs, "PATIENCE", 0)
            engine = setup.engine("cuda")
            engine.runtime.memory()
            gpu.clear()
            yield gpu, StoredEngine(engine, store, keys), StoredEngine(cpu, store, keys)


def questions(keys: list[bytes], num: int, tokens: int = 6) -> list[AskRequest]:
    """Different questions, of different lengths, over different chunks, with answers of different lengths."""
    rng, found = random.Random(3), []
    for number in range(num):
        blend = BlendParams(ratio=0.3, selector=("query", "hkvd", "first")[number % 3])
        sampling = replace(GREEDY, max_tokens=tokens + number, temperature=0.8 * (number % 2), seed=number)
        found.append(
            AskRequest("where is it? " * (1 + number), rng.sample(keys, 1 + number % len(keys)), blend, sampling)
        )
    return found


def check(gpu: FakeGpu) -> None:
    assert not gpu.errors
    check_waits(gpu, ALLOWED_WAITS)


def answers(stored: StoredEngine, asks: list[AskRequest], limits: Limits = LIMITS) -> list[list[list[int]]]:
    driver = CoreDriver(stored, limits)
    return [driver.ask(ask) for ask in asks]


@pytest.mark.parametrize("settings", [{}, {"eager": True}], ids=["graphs", "eager"])
def test_three_of_different_lengths_together(settings: dict[str, object], tmp_path: Path) -> None:
    with engines(tmp_path, **settings) as (gpu, on_gpu, on_cpu):
        asks = questions(on_gpu.keys, 3)
        driver = CoreDriver(on_gpu, LIMITS)
        listeners = [driver.arrive(ask)[0] for ask in asks]
        driver.run()
        check(gpu)
        assert [ids_of(listener) for listener in listeners] == answers(on_cpu, asks)


@pytest.mark.parametrize("swap_blocks", [100, 0], ids=["swapped", "computed again"])
def test_a_preempted_answer_goes_on(swap_blocks: int, tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        asks = questions(on_gpu.keys, 4, tokens=20)
        asks = [replace(ask, sampling=replace(ask.sampling, n=1 + 2 * (i % 2))) for i, ask in enumerate(asks)]
        use_pool(on_gpu.engine, num_blocks=21)
        driver = CoreDriver(on_gpu, LIMITS)
        driver.core.scheduler.swap_blocks = swap_blocks
        listeners = [driver.arrive(ask)[0] for ask in asks]
        driver.run()
        check(gpu)
        counts = driver.core.counts
        assert (counts.recomputed if not swap_blocks else counts.preempted) > 0
        assert (SequenceStatus.SWAPPED in driver.seen) is bool(swap_blocks)
        assert [ids_of(listener) for listener in listeners] == answers(on_cpu, asks)


def test_a_prefix_that_is_still_there_is_used(tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        first = AskRequest("where is it?", on_gpu.keys, BlendParams(mode="full"), GREEDY)
        asks = [first, first, replace(first, question="where is it? and when?"), replace(first, keys=on_gpu.keys[:2])]
        limits = replace(LIMITS, enable_prefix_caching=True, max_rows=16)
        driver, found = CoreDriver(on_gpu, limits), []
        for ask in asks:
            listener, _ = driver.arrive(ask)
            driver.run()
            found.append(listener.done().answers[0])
        check(gpu)
        assert found[0].prefix_cache_tokens == 0
        assert all(answer.prefix_cache_tokens >= 16 for answer in found[1:])
        assert [[answer.generated_ids] for answer in found] == answers(on_cpu, asks)


def test_several_answers_to_one_question_share_blocks(tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        [ask] = questions(on_gpu.keys, 1)
        ask = replace(ask, sampling=replace(ask.sampling, n=3, temperature=1.0, seed=5, max_tokens=20))
        assert answers(on_gpu, [ask]) == answers(on_cpu, [ask])
        check(gpu)


def held_engine(on_gpu: StoredEngine, limits: Limits = LIMITS) -> tuple[HeldStore, CoreDriver]:
    """A driver over a store whose reads can be held."""
    store = HeldStore(on_gpu.store)
    return store, CoreDriver(replace(on_gpu, store=store), limits)


def let_go_where_the_engine_waits(store: HeldStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let reads go that the engine waits for. Returns the names of the methods that did."""
    waits = list[str]()

    def lets_go(name: str) -> None:
        method = getattr(CudaLoader, name)

        def replaced(loader: CudaLoader, *args: int) -> None:
            waits.append(name)
            store.let_go()
            method(loader, *args)

        monkeypatch.setattr(CudaLoader, name, replaced)

    lets_go("wait")
    lets_go("close")
    return waits


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_an_answer_goes_on_while_a_layer_of_a_prompt_is_read(selector: str, tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        stream = AskRequest("who?", [], BlendParams(mode="full"), replace(GREEDY, max_tokens=60))
        ask = AskRequest("where is it?", on_gpu.keys, BlendParams(ratio=0.3, selector=selector), GREEDY)
        store, driver = held_engine(on_gpu)
        streaming, streamed = driver.arrive(stream)
        while not streamed.num_started:
            driver.step()
        for layer in range(3):
            store.hold_from(layer)
            if not layer:
                listener, state = driver.arrive(ask)
            before = len(streamed.outputs[0].out.token_ids)
            for _ in range(10):
                driver.step()
            assert len(streamed.outputs[0].out.token_ids) - before >= 4
            assert not state.num_started
        store.let_go()
        driver.run()
        check(gpu)
        assert [ids_of(streaming), ids_of(listener)] == answers(on_cpu, [stream, ask])


def test_a_prompt_alone_waits_for_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        store, driver = held_engine(on_gpu)
        waits = let_go_where_the_engine_waits(store, monkeypatch)
        store.hold_from(0)
        [ask] = questions(on_gpu.keys, 1)
        listener, _ = driver.arrive(ask)
        driver.step()
        assert "wait" in waits
        driver.run()
        check(gpu)
        assert [ids_of(listener)] == answers(on_cpu, [ask])


def test_the_next_prompt_loads_while_one_is_computed(tmp_path: Path) -> None:
    """It is computed afterwards, whatever its priority."""
    limits = replace(LIMITS, max_rows=16)  # a prompt takes several steps
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        keys = on_gpu.keys
        asks = [replace(ask, keys=own) for ask, own in zip(questions(keys, 3), (keys[:2], keys[2:], keys), strict=True)]
        store, driver = held_engine(on_gpu, limits)
        arrived = [driver.arrive(asks[0], priority=1)]
        while not driver.core.worker._paused:
            driver.step()
        arrived += [driver.arrive(ask) for ask in asks[1:]]
        driver.step()
        assert store.begins(keys[2])
        assert [state.sequences[0].prefilling for _, state in arrived] == [True, True, False]
        assert driver.core.worker._paused
        while not arrived[0][1].num_started:
            driver.step()
            assert not arrived[1][1].num_started
        driver.run()
        check(gpu)
        assert [ids_of(listener) for listener, _ in arrived] == answers(on_cpu, asks, limits)


def check_staged(driver: CoreDriver) -> None:
    """Check that one prompt at a time has KV on its way to the device."""
    loaders = [state._loader for state in driver.core.worker._prefills.values()]
    assert sum(isinstance(loader, CudaLoader) and bool(loader._transfer._staged) for loader in loaders) <= 1


def order_of(driver: CoreDriver, states: list[RequestState]) -> list[RequestState]:
    """Run the requests, and return them in the order in which their answers begin."""
    begun = list[RequestState]()
    while driver.core.busy:
        driver.step()
        check_staged(driver)
        begun += [state for state in states if state.num_started and state not in begun]
    return begun


@pytest.mark.parametrize("loads", [True, False], ids=["stored", "nothing to load"])
def test_a_higher_priority_comes_before_a_prompt_that_only_loads(loads: bool, tmp_path: Path) -> None:
    limits = replace(LIMITS, max_rows=16)  # a prompt takes several steps
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        keys = on_gpu.keys
        asks = [replace(ask, keys=own) for ask, own in zip(questions(keys, 3), (keys[:2], keys[2:], keys), strict=True)]
        if not loads:
            asks[2] = replace(asks[2], keys=[], blend=BlendParams(mode="full"))
        driver = CoreDriver(on_gpu, limits)
        first, second = (driver.arrive(ask, priority=1) for ask in asks[:2])
        while not driver.core.worker._paused:
            driver.step()
        assert second[1].sequences[0].prefilling
        urgent = driver.arrive(asks[2])
        driver.step()
        assert urgent[1].sequences[0].prefilling is loads
        assert order_of(driver, [first[1], second[1], urgent[1]]) == [first[1], urgent[1], second[1]]
        check(gpu)
        assert [ids_of(listener) for listener, _ in (first, second, urgent)] == answers(on_cpu, asks, limits)


def test_a_higher_priority_comes_before_a_prompt_whose_first_layer_is_not_read(tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        asks = [
            AskRequest("who?", [], BlendParams(mode="full"), replace(GREEDY, max_tokens=60)),
            *(replace(ask, keys=on_gpu.keys) for ask in questions(on_gpu.keys, 2)),
        ]
        store, driver = held_engine(on_gpu)
        streaming, streamed = driver.arrive(asks[0])
        while not streamed.num_started:
            driver.step()
        store.hold_from(0)
        later, later_state = driver.arrive(asks[1], priority=1)
        for _ in range(4):
            driver.step()
        urgent, urgent_state = driver.arrive(asks[2])
        for _ in range(4):
            driver.step()
        store.let_go()
        assert order_of(driver, [later_state, urgent_state]) == [urgent_state, later_state]
        check(gpu)
        assert [ids_of(listener) for listener in (streaming, later, urgent)] == answers(on_cpu, asks)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_gets_its_work_before_the_next_prompt_is_set_up(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(tmp_path) as (_, on_gpu, on_cpu):
        driver, calls = CoreDriver(on_gpu if device == "cuda" else on_cpu, LIMITS), list[str]()

        def watch(name: str) -> None:
            method = getattr(Worker, name)

            def watched(worker: Worker, *args: Any) -> Any:
                calls.append(name)
                return method(worker, *args)

            monkeypatch.setattr(Worker, name, watched)

        watch("begin")
        watch("prefill")
        for ask in questions(on_gpu.keys, 2):
            driver.arrive(ask)
        driver.step()
        assert calls == (["begin", "prefill", "begin"] if device == "cuda" else ["begin", "begin", "prefill"])
        driver.run()


def test_a_prompt_with_nothing_to_load_begins_when_it_finds_the_one_before_it(tmp_path: Path) -> None:
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        ask = AskRequest("where is it?", on_gpu.keys, BlendParams(mode="full"), GREEDY)
        driver = CoreDriver(on_gpu, replace(LIMITS, enable_prefix_caching=True, max_rows=16))
        first, second = driver.arrive(ask)[0], driver.arrive(ask)[0]
        driver.run()
        check(gpu)
        assert second.done().answers[0].prefix_cache_tokens >= 16
        assert ids_of(first) == ids_of(second) == answers(on_cpu, [ask])[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_do_not_depend_on_when_layers_are_read(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions that come at random, of other priorities, some of which are cancelled, in a pool that is too small for
    them."""
    with engines(tmp_path) as (gpu, on_gpu, on_cpu):
        rng, asks = random.Random(seed), questions(on_gpu.keys, 6, tokens=20)
        expected = answers(on_cpu, asks)
        use_pool(on_gpu.engine, num_blocks=19)
        store, driver = held_engine(on_gpu)
        let_go_where_the_engine_waits(store, monkeypatch)
        left, listeners, dropped = list(asks), list[Listener](), list[RequestState]()
        while left or driver.core.busy:
            store.hold_from(rng.choice((0, 1, 2, 3, inf)))
            if left and rng.random() < 0.3:
                listeners.append(driver.arrive(left.pop(0), priority=rng.choice((0, 1)))[0])
                dropped.append(driver.arrive(rng.choice(asks))[1])
            if dropped and rng.random() < 0.1:
                dropped.pop().cancelled = True
            driver.step()
            check_staged(driver)
        check(gpu)
        assert [ids_of(listener) for listener in listeners] == expected
