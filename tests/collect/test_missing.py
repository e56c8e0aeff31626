"""Chunks without KV are computed in order, equal to the bit, once, and nothing is evicted for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore, StoreReader
from checkpoints import write_checkpoint

from cacheblend_cli.cancellation import Cancelled
from cacheblend_cli.collect.collect_lock import collecting, collecting_alone
from cacheblend_cli.collect.collector import Collector, planned_of
from cacheblend_cli.collect.missing import MissingChunks
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine

WORDS = "Mara leads billing in Bergen while Jonas keeps the harbor and its cranes in order".split()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(path, "qwen3", seed=3, max_position_embeddings=1024)
    with Engine.load(EngineConfig(model=str(path), threads=1)) as engine:
        yield engine


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in "abc":
        lines = (f"{name}{i}: {' '.join(WORDS[i % 5 :])} {i}." for i in range(30))
        (tmp_path / "docs" / f"{name}.txt").write_text("\n\n".join(lines) + "\n")
    return tmp_path / "docs"


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[str], ChunkStore]]:
    opened: list[ChunkStore] = []

    def open_one(name: str = "store") -> ChunkStore:
        opened.append(ChunkStore.open(tmp_path / name, mode="write"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def store_texts(engine: Engine, store: ChunkStore, *paths: Path, context: str = "sink") -> None:
    """Store records and texts alone, as precompute does before it computes."""
    options = PrecomputeOptions(chunk_tokens=40, context=context, max_bytes=1)
    engine.precompute(store, list(map(str, paths)), options, lambda event: None)


def missing_of(engine: Engine, store: ChunkStore) -> MissingChunks:
    engine.use(store)
    missing = engine.missing(store)
    assert missing is not None
    return missing


def with_kv(store: ChunkStore) -> list[str]:
    return sorted(f"{Path(m.source).name}:{m.index}" for m in store.chunks() if m.has_kv)


@pytest.mark.parametrize("context", ["sink", "document"])
def test_the_same_kv_as_precompute_to_the_bit(
    engine: Engine, docs: Path, open_store: Callable[[str], ChunkStore], context: str
) -> None:
    ours, theirs = open_store("ours"), open_store("theirs")
    store_texts(engine, ours, docs, context=context)
    engine.precompute(theirs, [str(docs)], PrecomputeOptions(chunk_tokens=40, context=context), lambda event: None)
    missing, launches = missing_of(engine, ours), list[int]()
    total = missing.refresh()
    while num := missing.compute(()):
        launches.append(num)
    assert sum(launches) == total > len(launches) > 1
    keys = [m.key for m in theirs.chunks(prefixes=True)]
    assert [m.key for m in ours.chunks(prefixes=True)] == keys
    for key in keys:
        own, other = ours.get_blobs(key), theirs.get_blobs(key)
        assert own is not None
        assert other is not None
        assert own[1] == other[1]
    assert missing.refresh() == 0


def test_found_chunks_come_first_then_the_latest_documents(
    engine: Engine, docs: Path, open_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.collect.missing.pack_tokens", lambda device: 1)
    store = open_store()
    for name in "abc":
        store_texts(engine, store, docs / f"{name}.txt")
    [found] = [m.key for m in store.chunks() if m.source.endswith("a.txt") and m.index == 2]
    missing = missing_of(engine, store)
    missing.refresh()
    assert [missing.compute([b"unknown", found]) for _ in range(3)] == [1, 1, 1]
    assert with_kv(store) == ["a.txt:2", "c.txt:0", "c.txt:1"]


def test_only_new_documents_are_read_again(
    engine: Engine, docs: Path, open_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reads, plain = open_store(), list[bytes](), StoreReader.document
    store_texts(engine, store, docs)
    missing = missing_of(engine, store)
    total = missing.refresh()
    monkeypatch.setattr(StoreReader, "document", lambda reader, key: (reads.append(key), plain(reader, key))[1])
    while missing.compute(()):
        assert missing.refresh() < total
    assert reads == []
    (docs / "d.txt").write_text("One more page.\n")
    store_texts(engine, store, docs)
    reads.clear()
    assert missing.refresh() == 1
    assert len(reads) == 1


def test_a_launch_is_given_up_between_two_layers(
    engine: Engine, docs: Path, open_store: Callable[..., ChunkStore]
) -> None:
    """As soon as the engine has other work; the chunk is computed later."""
    store = open_store()
    store_texts(engine, store, docs)
    missing = missing_of(engine, store)
    total = missing.refresh()

    def beside_other_work() -> int:
        engine.service.between_steps(lambda: None)
        return missing.compute(())

    with pytest.raises(Cancelled):
        engine.service.between_steps(beside_other_work).result(30)
    assert with_kv(store) == []
    assert missing.refresh() == total
    assert engine.service.between_steps(lambda: missing.compute(())).result(30) > 0


def test_nothing_is_evicted_and_what_was_evicted_stays_so(
    engine: Engine, docs: Path, open_store: Callable[..., ChunkStore]
) -> None:
    store = open_store()
    engine.precompute(store, [str(docs / "a.txt")], PrecomputeOptions(chunk_tokens=40), lambda event: None)
    evicted = next(m.key for m in store.chunks())
    store.evict_chunks([evicted])
    before = set(with_kv(store))
    store_texts(engine, store, docs / "b.txt", docs / "c.txt")
    with store.read() as reader:
        state = reader.state()
    store.set_max_bytes(state.live_bytes + state.text_bytes + state.document_bytes + 3 * state.live_bytes // 10)
    missing = missing_of(engine, store)
    total, done = missing.refresh(), 0
    while num := missing.compute(()):
        done += num
    assert 0 < done < total
    assert before < set(with_kv(store))
    assert not store.has_kv(evicted)


@pytest.mark.parametrize(("name", "value"), [("tier", object()), ("writable", False)])
def test_stores_that_are_left_alone(
    engine: Engine, open_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    store = open_store()
    with monkeypatch.context() as patched:
        patched.setattr(store, name, value)
        assert engine.missing(store) is None


def test_the_lock_is_shared_by_precompute_runs_and_taken_alone_by_engines(
    open_store: Callable[..., ChunkStore],
) -> None:
    store, other = open_store(), open_store()
    with collecting(store), collecting(other), collecting_alone(store) as alone:
        assert not alone
    with collecting_alone(store) as alone, collecting_alone(other) as too:
        assert (alone, too) == (True, False)
        waiting = threading.Thread(target=lambda: collecting(other).__enter__())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()


def test_no_chunk_is_computed_twice(
    engine: Engine, docs: Path, open_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine and a run that computes what is missing, at once."""
    monkeypatch.setattr("cacheblend_cli.collect.missing.pack_tokens", lambda device: 1)
    store, other = open_store(), open_store()
    store_texts(engine, store, docs)
    missing = missing_of(engine, store)
    total, begun, counts = missing.refresh(), threading.Event(), [0, 0]

    def idle() -> None:
        while counts[1] == 0 or missing.refresh():
            counts[0] += missing.compute(())
            if counts[0] >= 3:
                begun.set()
                os.sched_yield()

    thread = threading.Thread(target=idle)
    thread.start()
    assert begun.wait(60)
    with collecting(other):
        chunks = [planned_of(m) for m in other.chunks() if not m.has_kv]
        statuses = [done.status for done in Collector(engine.collection(other), other).store(chunks)]
        counts[1] = len(statuses) or 1
    thread.join(60)
    assert set(statuses) == {"new"}
    assert sum(counts) == total >= 30


WAYS: dict[str, Callable[[Engine, ChunkStore, Path], object]] = {
    "precompute": lambda engine, store, docs: engine.precompute(
        store, [str(docs)], PrecomputeOptions(chunk_tokens=40, max_bytes=0), lambda event: None
    ),
    "idle": lambda engine, store, docs: (missing := missing_of(engine, store)).refresh() and missing.compute(()),
    "warm": lambda engine, store, docs: list(
        engine.collecting(store, [m.key for m in store.chunks()], engine.collection(store).codec)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_document_that_is_removed_while_it_is_computed_stays_removed(
    engine: Engine,
    docs: Path,
    open_store: Callable[..., ChunkStore],
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Engine, ChunkStore, Path], object],
) -> None:
    store, plain = open_store(), Collector.collect
    store_texts(engine, store, docs)

    def beside_removal(collector: Collector, chunks: Any) -> Iterator[Any]:
        yield from (done := list(plain(collector, chunks)))[:1]
        store.remove_documents([record.key for record in store.documents() if record.source.endswith("c.txt")])
        yield from done[1:]

    monkeypatch.setattr(Collector, "collect", beside_removal)
    way(engine, store, docs)
    assert {Path(m.source).name for m in store.chunks()} == {"a.txt", "b.txt"}
    assert with_kv(store) or way is WAYS["idle"]
