"""Summaries of documents: kept while a document is stored as they say and all its chunks have KV, and never longer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore, Memo, compact, prune, salvage, verify
from cacheblend_store.format.summaries import STAMP, SUMMARY_KEYS, stamp
from small_chunks import Operation, key_of, make_chunk, summary_of

ONE, TWO = (1, 2, 3), (3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two documents that share a chunk, each with a summary."""
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(6)])
        for source, seeds in (("0/one.md", ONE), ("0/two.md", TWO)):
            Operation("document", seeds, source=source).perform(store)
        assert store.put_summaries([summary_of("0/one.md", ONE), summary_of("0/two.md", TWO)]) == 2
    return tmp_path / "store"


def summaries(path: Path) -> set[str]:
    with ChunkStore.open(path) as store, store.read() as reader:
        return {summary.source for summary in reader.summaries()}


def test_a_summary_says_what_was_put_and_when_the_record_was_written(path: Path) -> None:
    with ChunkStore.open(path) as store, store.read() as reader:
        [one, _] = sorted(reader.summaries(), key=lambda s: s.source)
        assert vars(one) == {**vars(summary_of("0/one.md", ONE)), "updated": 1.0}
    assert summaries(path) == {"0/one.md", "0/two.md"}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda store: store.evict_chunks([key_of(1)]), {"0/two.md"}),
        (lambda store: store.evict_chunks([key_of(3)]), set()),
        (lambda store: store.remove_chunks([key_of(4)]), {"0/one.md"}),
        (lambda store: prune(store, to_bytes=0), set()),
        (lambda store: store.set_max_bytes(1), set()),
        (lambda store: Operation("document", (1, 2), source="0/one.md").perform(store), {"0/two.md"}),
        (lambda store: Operation("forget", source="0/two.md").perform(store), {"0/one.md"}),
        (lambda store: store.put_chunks([make_chunk(9)]), {"0/one.md", "0/two.md"}),
        (lambda store: store.put_memos([Memo("root", "/docs", {}, 1.0)]), {"0/one.md", "0/two.md"}),
        (lambda store: store.evict_chunks([key_of(5)]), {"0/one.md", "0/two.md"}),
    ],
)
def test_what_changes_a_document_or_takes_kv_of_it_drops_its_summary(
    path: Path, change: Callable[[ChunkStore], object], left: set[str]
) -> None:
    with ChunkStore.open(path, mode="write") as store:
        change(store)
        assert verify(store).ok
    assert summaries(path) == left


def test_no_summary_is_kept_of_a_document_that_is_stored_otherwise_or_lacks_kv(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store:
        assert store.put_summaries([summary_of("0/none.md", ONE)]) == 0
        assert store.put_summaries([summary_of("0/one.md", (1, 2))]) == 0
        store.evict_chunks([key_of(1)])
        assert store.put_summaries([summary_of("0/one.md", ONE), summary_of("0/two.md", TWO)]) == 1
        store.put_chunk(*make_chunk(1))
        assert store.put_summaries([summary_of("0/one.md", ONE)]) == 1
    assert summaries(path) == {"0/one.md", "0/two.md"}


def test_a_commit_by_a_version_without_summaries_ends_them(path: Path) -> None:
    """It would have dropped none."""
    with ChunkStore.open(path, mode="write") as store:
        with bare_writing(store) as (txn, dbs):
            txn.delete(key_of(1) + bytes(4), db=dbs["blobs"])
        assert summaries(path) == set()
        store.put_chunk(*make_chunk(9))
        with store.read() as reader:
            assert not list(reader.keys_with(SUMMARY_KEYS, "meta"))
        assert store.put_summaries([summary_of("0/two.md", TWO)]) == 1
    assert summaries(path) == {"0/two.md"}


def test_a_call_that_changes_nothing_commits_nothing(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store:
        with store.read() as reader:
            before = reader.pages.meta.txnid
        assert store.put_chunk(*make_chunk(1)) == "unchanged"
        with store.read() as reader:
            assert reader.pages.meta.txnid == before


def test_a_copy_has_them_and_a_new_file_has_none(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    assert summaries(tmp_path / "copy") == {"0/one.md", "0/two.md"}
    with ChunkStore.open(path, mode="write") as store:
        compact(store)
    assert summaries(path) == set()
    salvage(tmp_path / "copy")
    assert summaries(tmp_path / "copy") == set()
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunk(*make_chunk(9))
        assert verify(store).ok


def test_a_damaged_summary_is_passed_over_named_and_repaired(path: Path) -> None:
    name = SUMMARY_KEYS + summary_of("0/one.md", ONE).document
    with ChunkStore.open(path, mode="write") as store:
        with bare_writing(store) as (txn, dbs):
            value = bytearray(txn.get(name, db=dbs["meta"]))
            value[-3] ^= 4
            txn.put(name, bytes(value), db=dbs["meta"])
            txn.put(STAMP, stamp(txn.id()), db=dbs["meta"])
        assert summaries(path) == {"0/two.md"}
        assert [f.kind for f in verify(store).findings] == ["summary"]
        assert verify(store, repair=True).repaired == 1
        assert verify(store).ok
    assert summaries(path) == {"0/two.md"}
