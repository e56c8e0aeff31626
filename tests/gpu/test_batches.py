"""Several questions at once on a fake GPU: batches, preemption and the prefix cache change no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import CoreDriver, StoredEngine, ids_of
from fake_gpu import FakeGpu
from gpu_engine import Setup, check_waits, engine_gpu, use_pool

from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.kv import layer_graphs
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
