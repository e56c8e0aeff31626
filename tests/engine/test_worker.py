"""The worker's inputs are plain data: a second worker, sent the same as bytes, computes the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from engine_driver import CoreDriver, StoredEngine, open_stored_engine
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine import runtime
from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.worker.decode import EagerRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.engine.worker.prefill import PrefillInput
from cacheblend_cli.engine.worker.worker import DecodeInput, DecodeOutput, TableInput, Worker
from cacheblend_cli.kv.export import export
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.types import BlendParams

T = TypeVar("T")


def sent(value: T, kind: Any = None) -> T:
    """The value as another process gets it."""
    found: T = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind or type(value))
    assert found == value
    return found


class Leader(Worker):
    """Sends its inputs to a second worker with a separate pool, and compares the results."""

    def __init__(self, decoder: Decoder, memory: DeviceMemory) -> None:
        super().__init__(decoder, memory)
        pool = KVPool.of(decoder, memory.pool.allocator.num_blocks, memory.pool.block_size)
        self.other = Worker(decoder, DeviceMemory(pool, EagerRunner(decoder, pool)))
        self.calls: set[str] = set()

    def begin(
        self, given: PrefillInput, source: KVSource | None, on_logits: Callable[[Tensor], None] = lambda logits: None
    ) -> None:
        self.other.begin(sent(given), source)
        super().begin(given, source, on_logits)

    def prefill(self, numbers: Sequence[int], max_rows: int, waits: bool = True) -> list[PrefillResult]:
        if len(numbers) > 1:
            self.calls.add("prefill of several")
        ours = super().prefill(numbers, max_rows)  # waits, as on several ranks: KV arrives at both at different times
        theirs = self.other.prefill(sent([*numbers], list[int]), sent(max_rows))
        for own, other in zip(ours, theirs, strict=True):
            assert (own.num_filled, own.is_done) == (other.num_filled, other.is_done)
            if own.is_done:
                assert torch.equal(own.logits, other.logits)
                assert torch.equal(own.chosen, other.chosen)
        return ours

    def end(self, number: int) -> None:
        self.other.end(sent(number))
        super().end(number)

    def decode(self, given: DecodeInput, tokens: Tensor | None = None) -> DecodeOutput:
        ours, theirs = super().decode(given, tokens), self.other.decode(sent(given), tokens)
        assert torch.equal(ours.logits, theirs.logits)
        for own, other in zip(ours.attention, theirs.attention, strict=True):
            assert (own is None) == (other is None)
            assert own is None or other is None or torch.equal(own, other)
        return ours

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.calls.add("copy_blocks")
        self.other.copy_blocks(sent([*source], list[int]), sent([*target], list[int]))
        super().copy_blocks(source, target)

    def swap_out(self, number: int, blocks: Sequence[int]) -> None:
        self.other.swap_out(sent(number), sent([*blocks], list[int]))
        super().swap_out(number, blocks)

    def swap_in(self, number: int, blocks: Sequence[int]) -> None:
        self.calls.add("swap_in")
        self.other.swap_in(sent(number), sent([*blocks], list[int]))
        super().swap_in(number, blocks)

    def forget(self, number: int) -> None:
        self.other.forget(sent(number))
        super().forget(number)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("worker"), num_hidden_layers=3) as stored:
        yield stored


def test_a_second_worker_that_is_sent_the_same_computes_the_same(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "Worker", Leader)
    rng = random.Random(5)
    driver = CoreDriver(stored, Limits(max_sequences=5, max_rows=96, pool_tokens=16 * 20))
    worker = driver.core.worker
    assert isinstance(worker, Leader)
    for number in range(14):
        named = rng.sample(stored.keys, rng.randint(0, 3))
        blend = BlendParams(
            mode=rng.choice(("blend", "full")), ratio=0.4, selector=rng.choice(("query", "hkvd", "first"))
        )
        sampling = {"max_tokens": 24, "n": rng.choice((1, 3)), "seed": number, "temperature": rng.choice((0.0, 1.5))}
        question = stored.question("where does Mara work " * rng.randint(1, 3), **sampling)
        driver.arrive(replace(question, keys=named, blend=blend), verify=number % 5 == 0)
        driver.step()
    driver.run()
    for _ in range(4):  # short ones at once
        driver.arrive(replace(stored.question("where does Mara work who keeps a parrot"), keys=[]))
    _, leaving = driver.arrive(stored.question(max_tokens=30), verify=True)
    while not leaving.num_started:
        driver.step()
    leaving.cancelled = True
    driver.run()
    assert worker.calls == {"copy_blocks", "prefill of several", "swap_in"}
    assert SequenceStatus.SWAPPED in driver.seen
    for one in (worker, worker.other):
        assert not one._prefills
        assert not one._swapped, "KV is kept for nobody"


def test_kv_of_a_sequence_is_exported(stored: StoredEngine) -> None:
    question = replace(stored.question(max_tokens=30), blend=BlendParams(mode="full"))
    alone = prefill(stored.engine.runtime, stored.request(question))
    expected = export(stored.engine.runtime.decoder, alone.sequence, alone.plan.num_tokens)
    driver = CoreDriver(stored, Limits(max_sequences=2, max_rows=40, pool_tokens=16 * 20))
    _, state = driver.arrive(question)
    while not state.num_started:
        driver.step()
    table = state.sequences[0].paged
    assert table is not None
    reader = driver.core.worker.export_kv(TableInput.of(table), state.num_tokens)
    for found, layer in zip(reader, expected, strict=True):
        torch.testing.assert_close(found.k, layer.k)
        torch.testing.assert_close(found.v, layer.v)
    state.cancelled = True
    driver.run()
