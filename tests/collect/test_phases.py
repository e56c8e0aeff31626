"""A run stores all texts before any KV: then everything can be asked about, and KV is computed by whoever is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheblend_store import ChunkStore

from cacheblend_cli.client import EngineLost
from cacheblend_cli.collect import precompute, speed
from cacheblend_cli.collect.collector import Collector, planned_of
from cacheblend_cli.collect.events import PrecomputeEvent, PrecomputeReport
from cacheblend_cli.collect.plan import Planner
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.collect.speed import CollectSpeed
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import AskRequest, SamplingParams, SearchParams

OnEvent = Callable[[PrecomputeEvent], None]
KV = dict[bytes, list[bytes]]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(4):
        lines = [f"## Part {i}\n\nMara leads team {7 * i + number} in Bergen, since {i}.\n" for i in range(4)]
        (folder / f"{number}.md").write_text(f"# Page {number}\n\n" + "\n".join(lines) + f"\ncodeword{number}\n")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        yield opened


def run(
    engine: Engine, docs: Path, store: ChunkStore, on_event: OnEvent = lambda event: None, **given: Any
) -> PrecomputeReport:
    options = PrecomputeOptions(chunk_tokens=24, search=SearchParams(by="words"), **given)
    return engine.precompute(store, [str(docs)], options, on_event)


def interrupted(engine: Engine, docs: Path, store: ChunkStore, chunks: int, **given: Any) -> PrecomputeReport:
    """Interrupt a run after so many chunks. Return its report so far."""
    reports, left = list[PrecomputeReport](), [chunks]

    def on_event(event: PrecomputeEvent) -> None:
        if event.report is not None:
            reports.append(event.report)
        left[0] -= event.kind == "chunk"
        if reports and left[0] <= 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, docs, store, on_event, **given)
    return reports[0]


def stored_kv(store: ChunkStore) -> KV:
    return {m.key: found[1] for m in store.chunks() if (found := store.get_blobs(m.key)) is not None}


def sources(store: ChunkStore, word: str) -> list[str]:
    return [Path(hit.source).name for hit in search(store, word, Lookup(by="words")).hits]


def test_all_texts_can_be_found_before_any_kv_is_computed(engine: Engine, docs: Path, store: ChunkStore) -> None:
    run(engine, docs, store)
    (docs / "0.md").unlink()
    (docs / "1.md").write_text("# Page 1\n\nanother text\n")
    (docs / "9.md").write_text("# Page 9\n\ncodeword9\n")
    seen, before = list[tuple[PrecomputeReport, int]](), stored_kv(store)

    def on_event(event: PrecomputeEvent) -> None:
        if event.kind == "ready":
            assert sources(store, "codeword9") == ["9.md"]
            assert not sources(store, "codeword0"), "a document that is gone"
            assert not sources(store, "codeword1"), "an earlier version"
            assert sources(store, "another") == ["1.md"]
            assert event.report is not None
            seen.append((event.report, event.report.chunks))
            assert before.items() >= stored_kv(store).items(), "nothing was computed yet"

    run(engine, docs, store, on_event)
    [(report, chunks)] = seen
    assert chunks == report.chunks == report.with_kv == report.new + report.unchanged + report.replaced
    assert len(stored_kv(store)) == sum(1 for _ in store.chunks())


@pytest.mark.parametrize("chunks", [0, 3])
def test_an_interrupted_run_goes_on_without_reading_the_documents_again(
    engine: Engine, docs: Path, store: ChunkStore, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = interrupted(engine, docs, store, chunks)
    first = stored_kv(store)
    assert report.with_kv == len(first)
    assert 0 < report.chunks == sum(1 for _ in store.chunks())
    monkeypatch.setattr(Planner, "_cut", None)
    again = run(engine, docs, store)
    assert (again.unchanged, again.new, again.replaced) == (len(first), report.chunks - len(first), 0)
    assert stored_kv(store).items() >= first.items()


def test_kv_of_a_question_counts_and_is_not_computed_again(engine: Engine, docs: Path, store: ChunkStore) -> None:
    def on_event(event: PrecomputeEvent) -> None:
        if event.kind == "ready":
            keys = tuple(m.key for m in store.chunks())[-2:]
            engine.run_alone(store, AskRequest("Who?", keys, sampling=SamplingParams(max_tokens=1)))
            assert all(map(store.has_kv, keys))

    report = run(engine, docs, store, on_event)
    computed = sum(m.num_tokens for m in store.chunks())
    assert 0 < report.computed_tokens < computed
    assert report.new == report.with_kv == report.chunks


@dataclass
class Warm:
    """A running engine, which ends after some chunks. collected: keys that it computed."""

    engine: Engine
    store: ChunkStore
    ends_after: int = 1000
    collected: list[bytes] = field(default_factory=list)

    def collect(
        self, keys: Iterable[bytes], codec: str, salt: str, day: date | None, *, again: bool
    ) -> Iterator[tuple[bytes, str, str]]:
        collection = self.engine.collection(self.store, salt, day).in_codec(codec)
        planned = [planned_of(m) for key in keys if (m := self.store.get_chunk(key)) is not None]
        for done in Collector(collection, self.store).store(planned, again=again, every_s=0.0):
            if len(self.collected) >= self.ends_after:
                raise EngineLost("ended", "")
            self.collected.append(done.key)
            yield done


@pytest.mark.parametrize("context", ["sink", "document"])
def test_kv_is_equal_to_the_bit_whoever_computes_it(engine: Engine, docs: Path, tmp_path: Path, context: str) -> None:
    def stored_by(work: Callable[[ChunkStore], object]) -> KV:
        path = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        with ChunkStore.open(path, mode="write") as opened:
            work(opened)
            return stored_kv(opened)

    def asked(opened: ChunkStore) -> None:
        run(engine, docs, opened, context=context, texts_only=True)
        assert not stored_kv(opened)
        for manifest in list(opened.chunks()):
            engine.run_alone(opened, AskRequest("Who?", (manifest.key,), sampling=SamplingParams(max_tokens=1)))

    def by_engine(opened: ChunkStore, ends_after: int) -> None:
        warm = Warm(engine, opened, ends_after)
        report = run(engine, docs, opened, context=context, warm=warm)
        assert len(warm.collected) == min(ends_after, len(stored_kv(opened)))
        assert report.with_kv == report.chunks == report.new + report.unchanged

    def continued(opened: ChunkStore) -> None:
        interrupted(engine, docs, opened, 5, context=context)
        run(engine, docs, opened, context=context)

    here = stored_by(lambda opened: run(engine, docs, opened, context=context))
    assert len(here) > 10
    assert stored_by(continued) == here
    assert stored_by(lambda opened: by_engine(opened, 1000)) == here
    assert stored_by(lambda opened: by_engine(opened, 3)) == here
    assert stored_by(asked) == here


def test_the_engine_is_not_used_with_a_quota(engine: Engine, docs: Path, store: ChunkStore) -> None:
    warm = Warm(engine, store)
    report = run(engine, docs, store, warm=warm, max_bytes=1 << 30)
    assert (warm.collected, report.with_kv) == ([], report.chunks)


def test_the_time_is_estimated_from_earlier_runs_and_corrected(
    engine: Engine, docs: Path, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "estimate_seconds", None)  # no measurement
    monkeypatch.setattr(CollectSpeed, "rows_per_s", 10.0)
    found = run(engine, docs, store, dry_run=True).difference
    assert found.seconds == (found.computed_tokens + 12 * found.new.chunks) / 10, "nothing is computed twice"
    similar = run(engine, docs, store, dry_run=True, context="neighbours").difference
    assert similar.seconds > 2 * similar.computed_tokens / 10, "left contexts are computed, too"
    clock, events = count(), list[PrecomputeEvent]()
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))  # a second a chunk
    run(engine, docs, store, events.append)
    left = [event.left_s for event in events if event.kind == "chunk"]
    [correction] = [event.left_s for event in events if event.kind == "speed"]
    assert left[0] == pytest.approx(found.seconds, rel=0.1)
    assert correction == pytest.approx(len(left) - left.index(correction) - 1, rel=0.2)
    assert left[-1] < 2
