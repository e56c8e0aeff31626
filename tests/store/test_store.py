"""The store: data is read back unchanged, damage is found, and chunks are complete."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
from bare_store import bare_writing
from cacheblend_store import (
    AmbiguousId,
    BadBlob,
    ChunkNotFound,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    StoreCorrupt,
    StoreError,
    StoreFormat,
    StoreLocked,
    StoreNotFound,
    StorePermission,
    chunk_key,
    compact,
    salvage,
    stats,
    verify,
)
from cacheblend_store import reader as store_reader
from cacheblend_store.format.blobs import CODECS, blob_spec
from cacheblend_store.format.keys import blob_key
from cacheblend_store.format.records import blob_hasher
from cacheblend_store.lmdb_file.datafile import open_lmdb
from cacheblend_store.lmdb_file.directory import MAKING
from cacheblend_store.lmdb_file.locks import writer_lock
from coded_chunks import DIM, HEADS, LAYERS, PARTS, make_chunk
from stored_texts import forget


def load(store: ChunkStore, key: bytes) -> list[dict[str, bytes]]:
    with store.read() as reader:
        manifest = reader.manifest(key)
        assert manifest is not None
        return [{n: bytes(v) for n, v in reader.layer(manifest, i).items()} for i in range(LAYERS)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        yield store


def test_stored_chunks_are_read_back_after_reopening(store: ChunkStore) -> None:
    manifest, blobs = make_chunk(1)
    assert store.put_chunk(manifest, blobs) == "new"
    assert store.put_chunk(manifest, blobs) == "unchanged"
    identity = store.identity
    store.close()
    with ChunkStore.open(store.path) as again:
        assert again.identity == identity
        found = again.get_chunk(manifest.key)
        assert found is not None
        assert (found.text, found.token_ids, found.span) == (manifest.text, manifest.token_ids, manifest.span)
        expected = [{name: bytes(part["data"]) for name, part in safetensors.deserialize(blob)} for blob in blobs]
        assert load(again, manifest.key) == expected
        with pytest.raises(StorePermission):
            again.put_chunk(manifest, blobs)


def test_keys_depend_on_everything_and_fields_do_not_run_together() -> None:
    base = chunk_key(PARTS, (1, 2, 3))
    others = [
        chunk_key(replace(PARTS, **{name: value}), (1, 2, 3))
        for name, value in {
            "model": "x", "tokenizer": "x", "prefix_ids": (1,), "left_context_ids": (1,), "codec": "int8", "salt": "s",
        }.items()
    ]  # fmt: skip
    others += [chunk_key(PARTS, (1, 2)), chunk_key(replace(PARTS, prefix_ids=(1, 2, 1)), (2, 3))]
    others.append(chunk_key(replace(PARTS, model="modelt", tokenizer="okenizer"), (1, 2, 3)))
    assert len({base, *others}) == len(others) + 1


def test_ids_resolve_by_unique_prefix(store: ChunkStore) -> None:
    keys = []
    for seed in range(40):
        manifest, blobs = make_chunk(seed)
        store.put_chunk(manifest, blobs)
        keys.append(manifest.key)
    assert store.resolve(keys[0].hex()[:12]) == keys[0]
    shared = next(k.hex()[0] for k in keys if sum(o.hex()[0] == k.hex()[0] for o in keys) > 1)
    with pytest.raises(AmbiguousId):
        store.resolve(shared)
    for bad in ("", "xyz", "0" * 41, "f" * 40):
        with pytest.raises(ChunkNotFound):
            store.resolve(bad)


def test_documents_own_their_chunks(store: ChunkStore) -> None:
    (a, blobs_a), (b, blobs_b) = make_chunk(1), make_chunk(2)
    store.put_chunk(a, blobs_a)
    store.put_chunk(b, blobs_b)

    def record(source: str, *keys: bytes) -> DocumentRecord:
        return DocumentRecord(
            source, a.collection, "d", tuple(DocumentChunk(k, i, 0, 1) for i, k in enumerate(keys)), 1.0
        )

    store.put_documents([record("x.md", a.key, b.key)])
    store.put_documents([record("y.md", a.key)])
    assert store.put_documents([record("x.md")]) == [b.key]  # a is still in y
    assert store.get_chunk(b.key) is None
    assert forget(store, a.collection, "y.md") == [a.key]
    assert stats(store).live_bytes == 0


def test_a_chunk_that_moves_between_documents_of_one_commit_stays(store: ChunkStore) -> None:
    moved, gone = make_chunk(1), make_chunk(2)
    store.put_chunks([moved, gone])

    def record(source: str, *keys: bytes) -> DocumentRecord:
        places = tuple(DocumentChunk(k, i, 0, 1) for i, k in enumerate(keys))
        return DocumentRecord(source, moved[0].collection, "d", places, 1.0)

    assert store.put_documents([record("a.md", moved[0].key, gone[0].key), record("b.md")]) == []
    assert store.put_documents([record("a.md"), record("b.md", moved[0].key)]) == [gone[0].key]
    assert [m.key for m in store.chunks()] == [moved[0].key]
    assert store.put_documents([]) == []
    assert store.put_documents([record("b.md")]) == [moved[0].key]


def test_only_what_was_there_is_told_as_removed(store: ChunkStore) -> None:
    (a, blobs_a), (b, blobs_b) = make_chunk(1), make_chunk(2)
    store.put_chunks([(a, blobs_a), (b, blobs_b)])
    places = tuple(DocumentChunk(m.key, i, 0, 1) for i, m in enumerate((a, b)))
    store.put_documents([DocumentRecord("x.md", a.collection, "d", places, 1.0)])
    assert store.remove_chunks([a.key, a.key]) == 1
    assert forget(store, a.collection, "x.md") == [b.key]


def test_a_closed_store_says_so_and_stays_closed(store: ChunkStore) -> None:
    store.put_chunk(*make_chunk(1))
    open_before = set(os.listdir("/proc/self/fd"))
    store.close()
    uses: list[Callable[[], object]] = [
        lambda: stats(store),
        lambda: store.get_chunk(b"x" * 20),
        lambda: list(store.chunks()),
        lambda: store.put_chunk(*make_chunk(2)),
        lambda: verify(store),
        lambda: compact(store),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=str(store.path)):
            use()
    assert set(os.listdir("/proc/self/fd")) < open_before


def test_every_kind_of_damage_to_a_blob_is_a_bad_blob(store: ChunkStore) -> None:
    manifest, blobs = make_chunk(1)
    for damage in (lambda b: b[:-1], lambda b: b + b"x", lambda b: b"", lambda b: bytes([b[0] ^ 1]) + b[1:], None):
        store.put_chunk(manifest, blobs)
        with bare_writing(store) as (txn, dbs):
            name = blob_key(manifest.key, 1)
            if damage is None:
                txn.delete(name, db=dbs["blobs"])
            else:
                txn.put(name, damage(blobs[1]), db=dbs["blobs"])
        with pytest.raises(BadBlob):
            load(store, manifest.key)
        assert store.put_chunk(manifest, blobs) == "replaced"
        load(store, manifest.key)


def test_a_blob_swapped_with_another_layers_or_chunks_is_found(store: ChunkStore) -> None:
    (a, blobs_a), (b, blobs_b) = make_chunk(1), make_chunk(2)
    store.put_chunk(a, blobs_a)
    store.put_chunk(b, blobs_b)
    for foreign in (blobs_a[0], blobs_b[1]):
        with bare_writing(store) as (txn, dbs):
            txn.put(blob_key(a.key, 1), foreign, db=dbs["blobs"])
        with pytest.raises(BadBlob):
            load(store, a.key)


def test_a_damaged_manifest_is_passed_over_and_replaced(store: ChunkStore) -> None:
    manifest, blobs = make_chunk(1)
    store.put_chunk(manifest, blobs)
    with bare_writing(store) as (txn, dbs):
        value = bytearray(txn.get(manifest.key, db=dbs["chunks"]))
        value[40] ^= 4
        txn.put(manifest.key, bytes(value), db=dbs["chunks"])
    with pytest.raises(BadBlob):
        store.get_chunk(manifest.key)
    assert list(store.chunks()) == []
    assert store.damaged_keys() == [manifest.key]
    assert store.put_chunk(manifest, blobs) == "replaced"
    assert store.damaged_keys() == []


def test_a_store_that_lost_its_file_is_no_new_store(store: ChunkStore) -> None:
    store.put_chunk(*make_chunk(1))
    store.close()
    (store.path / "data.mdb").unlink()
    for mode in ("read", "write"):
        with pytest.raises(StoreCorrupt):
            ChunkStore.open(store.path, mode=mode)


def test_foreign_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        ChunkStore.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreFormat):
        ChunkStore.open(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(StoreFormat):
        ChunkStore.open(tmp_path / "full", mode="write")
    (tmp_path / "full" / "data.mdb").write_bytes(os.urandom(20000))
    with pytest.raises(StoreFormat):
        ChunkStore.open(tmp_path / "full", mode="write")


def test_another_format_version_is_refused(store: ChunkStore) -> None:
    with bare_writing(store) as (txn, dbs):
        txn.put(b"format_version", b"99", db=dbs["meta"])
    store.close()
    with pytest.raises(StoreFormat, match="99"):
        ChunkStore.open(store.path)


def test_the_writer_lock_names_its_holder(store: ChunkStore) -> None:
    code = f"import sys; from pathlib import Path; from cacheblend_store.lmdb_file.locks import writer_lock\nwith writer_lock(Path({str(store.path)!r}), 5):\n print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(StoreLocked, match=str(holder.pid)), writer_lock(store.path, 0.05):
            pass
    finally:
        holder.kill()
        holder.wait()
    with writer_lock(store.path, 5):  # a dead holder holds nothing
        pass


def test_a_full_disk_is_named_and_loses_nothing(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_chunk(*make_chunk(1))
    usage = os.statvfs(store.path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 1000, "total": usage.f_blocks})())
    with pytest.raises(StoreError, match="free"):
        store.put_chunk(*make_chunk(2))
    assert len(list(store.chunks())) == 1


def test_pages_of_the_file_that_are_free_count_as_room(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `chunks prune` on a full disk."""
    chunks = [make_chunk(seed, 600) for seed in range(16)]
    store.put_chunks(chunks)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 0})())
    with pytest.raises(StoreError, match="free"):
        store.put_chunk(*make_chunk(20, 600))
    store.remove_chunks([manifest.key for manifest, _ in chunks[:12]])
    size = (store.path / "data.mdb").stat().st_size
    assert store.put_chunk(*make_chunk(20, 600)) == "new"
    assert (store.path / "data.mdb").stat().st_size == size
    with pytest.raises(StoreError, match="free"):
        store.put_chunks([make_chunk(seed, 600) for seed in range(30, 40)])


@pytest.mark.parametrize("how", ["compact", "repair"])
def test_what_an_interrupted_copy_left_makes_room_for_the_next(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store.put_chunk(*make_chunk(1))
    left = store.path / "making.tmp"
    left.mkdir()
    (left / "half.mdb").write_bytes(b"half of a copy")
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: type("U", (), {"free": 0 if (left / "half.mdb").exists() else 1 << 40})()
    )
    if how == "compact":
        compact(store)
    else:
        store.close()
        assert salvage(store.path).chunks == 1
    assert not left.exists()


def test_a_repair_that_fails_leaves_no_copy(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    store.put_chunk(*make_chunk(1))
    store.close()
    monkeypatch.setattr("cacheblend_store.upkeep.rewriting._copy", fail)
    with pytest.raises(OSError, match="gone"):
        salvage(store.path)
    assert not (store.path / "making.tmp").exists()
    monkeypatch.undo()
    assert salvage(store.path).chunks == 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_copied_layer_is_the_layer_and_is_checked_where_it_lands(store: ChunkStore, codec: str) -> None:
    manifest, blobs = make_chunk(3, num_tokens=40, codec=codec)
    store.put_chunk(manifest, blobs)
    with store.read() as reader:
        found = reader.manifest(manifest.key)
        assert found is not None
        wanted = {name: bytes(part) for name, part in reader.layer(found, 1).items()}
        targets = {name: memoryview(bytearray(len(part))) for name, part in wanted.items()}
        reader.copy_layer(found, 1, targets)
        assert {name: bytes(part) for name, part in targets.items()} == wanted
        whole = bytes(reader.blob(found, 1))
    for at in {8, len(whole) // 2, len(whole) - 1}:
        with bare_writing(store) as (txn, dbs):
            txn.put(blob_key(manifest.key, 1), whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], db=dbs["blobs"])
        with store.read() as reader, pytest.raises(BadBlob):
            reader.copy_layer(found, 1, targets)


def test_copying_a_layer_lets_go_of_the_gil_four_times(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the page that says how far the blob goes, and one of it; a digest of each tensor. Each hands the GIL to
    somebody who may keep it a while."""
    manifest, blobs = make_chunk(3, num_tokens=4200)  # K and V of more than 256 KiB each
    store.put_chunk(manifest, blobs)
    calls: list[str] = []
    plain = os.preadv

    class Counted:
        def __init__(self, *of: Any) -> None:
            self._hasher = blob_hasher(*of)
            self.digest = self._hasher.digest

        def update(self, part: memoryview) -> None:
            calls.extend(["digest"] * (len(part) > 64 << 10))  # of less xxhash keeps the GIL
            self._hasher.update(part)

    def preadv(*of: Any) -> int:
        calls.append("read")
        return plain(*of)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(store_reader.records, "blob_hasher", Counted)
    with store.read() as reader:
        found = reader.manifest(manifest.key)
        assert found is not None
        spec = blob_spec("float32", 4200, HEADS, DIM)
        targets = {name: memoryview(bytearray(tensor.num_bytes)) for name, tensor in spec.items()}
        reader.copy_layer(found, 0, targets)
        calls.clear()  # the pages of the tree are read
        reader.copy_layer(found, 1, targets)
    assert calls == ["read", "read", "digest", "digest"]


def test_a_document_is_kept_once_a_context(store: ChunkStore) -> None:
    (a, blobs_a), (b, blobs_b) = make_chunk(1), make_chunk(2)
    store.put_chunk(a, blobs_a)
    store.put_chunk(b, blobs_b)

    def record(context: str, *keys: bytes) -> DocumentRecord:
        places = tuple(DocumentChunk(k, i, 0, 1) for i, k in enumerate(keys))
        return DocumentRecord("x.md", a.collection, "d", places, 1.0, {}, context)

    records = [record("neighbours", b.key), record("sink", a.key, b.key)]
    for one in records:
        assert store.put_documents([one]) == []
    assert store.documents() == records
    assert store.get_document(a.collection, "x.md", "document") is None
    assert verify(store).ok
    assert forget(store, a.collection, "x.md") == [a.key]  # b is still in the other
    assert store.get_document(a.collection, "x.md", "neighbours") == records[0]
    assert forget(store, a.collection, "x.md", "neighbours") == [b.key]


def test_only_what_is_made_aside_goes_without_syncing(tmp_path: Path) -> None:
    def syncs(folder: Path) -> bool:
        folder.mkdir(parents=True)
        environment = open_lmdb(folder)
        flags: dict[str, bool] = environment.flags()
        environment.close()
        return flags["sync"]

    ChunkStore.open(tmp_path / "store", mode="write").close()
    assert not syncs(tmp_path / "store" / MAKING)
    assert syncs(tmp_path / MAKING)  # somebody's store is called so
