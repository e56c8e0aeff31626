"""Chunks that are committed together: all of them are reported, in order, and only once they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreFull
from cacheblend_store.store import PutStatus
from small_chunks import key_of, make_chunk

from cacheblend_cli.collect import commits
from cacheblend_cli.collect.commits import commit


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore.open(tmp_path / "store", mode="write")


def add_all(store: ChunkStore, seeds: range, every_s: float = 1.0) -> tuple[list[tuple[bytes, PutStatus]], int]:
    """Return (reports, number of commits), after checking that each chunk is stored when it is reported."""
    found, before = [], commits_of(store)
    for one in commit(store, map(make_chunk, seeds), every_s=every_s):
        assert store.get_chunk(one[0]) is not None
        found.append(one)
    return found, commits_of(store) - before


def commits_of(store: ChunkStore) -> int:
    with store.read() as reader:
        return reader.pages.meta.txnid


def test_a_fast_computation_commits_in_groups_and_a_slow_one_at_once(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(commits.time, "monotonic", lambda: now[0])
    found, num_commits = add_all(store, range(10))
    assert [key for key, _ in found] == [key_of(seed) for seed in range(10)]
    assert {status for _, status in found} == {"new"}
    assert num_commits == 1
    assert add_all(store, range(10, 15), every_s=0.0)[1] == 5
    monkeypatch.setattr(commits, "GROUP_BYTES", 1)
    assert add_all(store, range(20, 25))[1] == 5


def test_a_group_beyond_the_quota_is_stored_chunk_by_chunk(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits.time, "monotonic", lambda: 100.0)
    seeds = range(2, 32, 3)  # the largest
    store.set_max_bytes(70_000)
    found, _ = add_all(store, seeds)
    assert [key for key, _ in found] == [key_of(seed) for seed in seeds]
    there = {m.key for m in store.chunks() if m.has_kv}
    assert there < {key_of(seed) for seed in seeds}  # the older ones had to go
    assert key_of(seeds[-1]) in there
    store.set_max_bytes(1000)
    with pytest.raises(StoreFull):
        add_all(store, range(2, 4))
