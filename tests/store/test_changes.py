"""The change log: changes between two generations, and gaps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from cacheblend_store.format import changes
from cacheblend_store.format.changes import LOG, MAX_BYTES, Changes, append, changes_between
from cacheblend_store.format.records import document_key
from cacheblend_store.writer import StoreWriter
from stored_texts import forget, put_document


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        yield opened


def since(store: ChunkStore, generation: int) -> Changes | None:
    with store.read() as reader:
        return reader.changes_since(generation)


def test_changes_name_the_chunks_and_documents_of_every_commit(store: ChunkStore) -> None:
    before = store.generation
    first = {bytes.fromhex(i) for i in put_document(store, "/a.md", "one", "two")}
    between = store.generation
    second = {bytes.fromhex(i) for i in put_document(store, "/b.md", "three")}
    a, b = (document_key("one", name) for name in ("/a.md", "/b.md"))
    assert since(store, before) == Changes(first | second, {a, b})
    assert since(store, between) == Changes(second, {b})
    between = store.generation
    forget(store, "one", "/a.md")
    assert since(store, between) == Changes(first, {a})
    assert since(store, store.generation) == Changes(set(), set())


def test_a_use_and_an_eviction_change_nothing(store: ChunkStore) -> None:
    [key] = [bytes.fromhex(i) for i in put_document(store, "/a.md", "one")]
    before = store.generation
    store.touch([key])
    assert store.flush_touches()
    assert store.evict_chunks([key]) == 1
    assert store.generation == before


def test_a_commit_without_keys_leaves_a_gap_and_later_ones_are_logged_again(store: ChunkStore) -> None:
    before = store.generation
    put_document(store, "/a.md", "one")
    store.transact(StoreWriter.changed)
    after = store.generation
    put_document(store, "/b.md", "two")
    assert since(store, before) is None
    known = since(store, after)
    assert known is not None
    assert known.documents == {document_key("one", "/b.md")}


@pytest.mark.parametrize("value", [b"", b"no record", None])
def test_a_damaged_or_missing_log_knows_nothing_and_is_begun_again(store: ChunkStore, value: bytes | None) -> None:
    before = store.generation
    put_document(store, "/a.md", "one")
    with bare_writing(store) as (transaction, dbs):
        if value is None:
            transaction.delete(LOG, db=dbs["meta"])
        else:
            transaction.put(LOG, value, db=dbs["meta"])
    assert since(store, before) is None
    before = store.generation
    put_document(store, "/b.md", "two")
    assert since(store, before) is not None


def test_the_log_is_bounded_and_forgets_the_oldest_commits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_BYTES", MAX_BYTES // 10)
    value, num_commits = b"", 300
    for generation in range(num_commits):
        keys = Changes({generation.to_bytes(20, "big")}, set())
        value = append(value, generation, generation + 1, keys)
        assert len(value) <= MAX_BYTES // 10
    assert changes_between(value, 0, num_commits) is None
    last = changes_between(value, num_commits - 50, num_commits)
    assert last is not None
    assert len(last.chunks) == 50


def test_a_commit_of_too_many_chunks_is_not_logged() -> None:
    many = Changes({number.to_bytes(20, "big") for number in range(MAX_BYTES // 20 + 1)}, set())
    value = append(None, 0, 1, many)
    assert changes_between(value, 0, 1) is None
    value = append(value, 1, 2, Changes({b"k" * 20}, set()))
    assert changes_between(value, 1, 2) == Changes({b"k" * 20}, set())
