"""Memos survive everything that chunks survive, and are never misread."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore, Memo, compact, salvage, verify
from cacheblend_store.format.records import encode_memo, seal
from small_chunks import make_chunk

ONE = Memo("root", "/docs\ud800", {"chunk_tokens": 56, "linked": ["/é"]}, 1.0)
TWO = Memo("root", "/notes", {}, 2.5)
DATE = Memo("date", "/docs", {"day": "2024-07-26"}, 3.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunks([make_chunk(seed, 0) for seed in range(4)])
        store.put_memos([TWO, ONE, DATE])
    return tmp_path / "store"


def test_a_memo_is_kept_by_kind_and_name_and_the_later_one_counts(path: Path) -> None:
    later = Memo("root", "/notes", {"chunk_tokens": 512}, 4.0)
    with ChunkStore.open(path, mode="write") as store:
        before = store.generation
        assert store.memos("root") == [ONE, TWO]
        assert store.memos("date") == [DATE]
        assert store.memos("nothing") == []
        assert store.memo("date", "/docs") == DATE
        assert store.memo("date", "/notes") is None
        store.put_memos([later])
        assert store.generation == before, "an index of the chunks is as good as it was"
    with ChunkStore.open(path) as store:
        assert store.memos("root") == [ONE, later]
        assert verify(store).ok
        assert len(list(store.chunks())) == 4


def test_a_damaged_memo_is_passed_over_named_and_repaired(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store:
        with bare_writing(store) as (txn, dbs):
            value = bytearray(txn.get(ONE.key, db=dbs["meta"]))
            value[-3] ^= 4
            txn.put(ONE.key, bytes(value), db=dbs["meta"])
        assert store.memos("root") == [TWO]
        assert store.memo("root", ONE.name) is None
        assert [(f.kind, f.key) for f in verify(store).findings] == [("memo", ONE.key)]
        assert verify(store, repair=True).repaired == 1
        assert verify(store).ok
        assert store.memos("root") == [TWO]


@pytest.mark.parametrize("payload", [b'{"kind": "root", "future": 1}', b'{"kind": 7}', b"[]", b"{}", b"\xff"])
def test_a_memo_of_no_sense_is_damage(path: Path, payload: bytes) -> None:
    with ChunkStore.open(path, mode="write") as store:
        with bare_writing(store) as (txn, dbs):
            txn.put(ONE.key, seal(ONE.key, payload), db=dbs["meta"])
        assert store.memos("root") == [TWO]
        assert not verify(store).ok


def test_a_memo_under_anothers_key_is_not_read(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store:
        with bare_writing(store) as (txn, dbs):
            txn.put(TWO.key, encode_memo(ONE), db=dbs["meta"])
        assert store.memos("root") == [ONE]


def test_memos_outlive_compaction_and_salvage(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store:
        compact(store)
        assert store.memos("root") == [ONE, TWO]
    data = bytearray((path / "data.mdb").read_bytes())
    with ChunkStore.open(path) as store, store.read() as reader:
        uses = reader.pages.tree("lru")
        assert uses is not None
        start = uses.root * reader.pages.meta.page_size
    data[start : start + 64] = bytes(64)
    (path / "data.mdb").write_bytes(data)
    salvage(path)
    with ChunkStore.open(path) as store:
        assert store.memos("root") == [ONE, TWO]
        assert store.memos("date") == [DATE]
        assert verify(store).ok
