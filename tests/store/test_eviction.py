"""Eviction removes KV and keeps the text: an evicted chunk is still listed, and its KV is computed when needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import (
    BadBlob,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    Locator,
    StoreFull,
    prune,
    stats,
    verify,
)
from cacheblend_store.format.records import decode_manifest, encode_manifest, seal_json, unseal
from cacheblend_store.writer import with_digests
from small_chunks import COLLECTION, key_of, make_chunk

SEEDS = range(2, 32, 3)  # chunks of one size, the largest
SIZE = sum(map(len, make_chunk(2)[1]))
RECORD = max(len(encode_manifest(with_digests(*make_chunk(seed)))) for seed in SEEDS)


def room(num_kv: int, num_chunks: int, store: ChunkStore | None = None) -> int:
    """Bytes of a quota that holds so many chunks, the KV of so many of them, and the document records of a store."""
    return num_kv * SIZE + num_chunks * RECORD + (stats(store).document_bytes if store else 0)


def own(store: ChunkStore, *seeds: int) -> None:
    """Store a document of these chunks, so that they stay as text."""
    places = tuple(DocumentChunk(key_of(seed), i, i, i + 1) for i, seed in enumerate(seeds))
    store.put_documents([DocumentRecord("own.md", COLLECTION, "digest", places, 1.0)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        yield store


def with_kv(store: ChunkStore) -> set[bytes]:
    return {m.key for m in store.chunks() if m.has_kv}


def keys(*seeds: int) -> set[bytes]:
    return {key_of(seed) for seed in seeds}


def test_the_quota_takes_the_kv_and_leaves_the_text(store: ChunkStore) -> None:
    own(store, *SEEDS)
    store.set_max_bytes(room(3, 5, store))
    for seed in SEEDS[:5]:
        assert store.put_chunk(*make_chunk(seed)) == "new"
    assert with_kv(store) == keys(*SEEDS[2:5])
    evicted = store.get_chunk(key_of(SEEDS[0]))
    assert evicted is not None
    assert evicted.evicted
    assert (evicted.text, evicted.token_ids) == (f"{SEEDS[0]} 0", make_chunk(SEEDS[0])[0].token_ids)
    assert evicted.num_bytes == 0
    assert store.resolve(evicted.id) == evicted.key
    with store.read() as reader, pytest.raises(BadBlob, match=evicted.id[:12]):
        reader.layer(evicted, 0)
    assert stats(store).live_bytes == 3 * SIZE
    report = verify(store)
    assert report.ok
    assert (report.chunks, report.without_kv) == (5, 2)


def test_an_evicted_chunk_is_no_longer_there_for_those_who_ask_for_kv(store: ChunkStore) -> None:
    own(store, 2)
    store.put_chunk(*make_chunk(2))
    assert store.has_kv(key_of(2))
    store.set_max_bytes(RECORD)
    assert store.has_chunk(key_of(2))
    assert not store.has_kv(key_of(2))


def test_a_quota_holds_from_when_it_is_set(store: ChunkStore) -> None:
    own(store, *SEEDS)
    store.put_chunks([make_chunk(seed) for seed in SEEDS])
    store.touch(keys(SEEDS[0]))
    store.flush_touches()
    store.set_max_bytes(room(2, len(SEEDS), store) + 1)
    assert stats(store).live_bytes == 2 * SIZE
    assert key_of(SEEDS[0]) in with_kv(store)
    assert len(list(store.chunks())) == len(SEEDS)
    quota = room(1, len(SEEDS), store)
    store.close()
    with ChunkStore.open(store.path, mode="write", max_bytes=quota) as again:
        assert with_kv(again) == keys(SEEDS[0])
        assert verify(again).ok


def test_kv_comes_back_to_an_evicted_chunk_and_is_what_is_read(store: ChunkStore) -> None:
    manifest, blobs = make_chunk(2)
    own(store, 2)
    store.put_chunk(manifest, blobs)
    store.set_max_bytes(RECORD)
    store.set_max_bytes(0)
    before = store.generation
    assert store.put_chunk(manifest, blobs) == "new"
    assert store.put_chunk(manifest, blobs) == "unchanged"
    assert store.generation == before, "the same chunks with the same texts: no index is stale"
    assert verify(store).ok
    with store.read() as reader:
        assert [bytes(reader.blob(reader.manifest(manifest.key), n)) for n in range(manifest.num_layers)] == list(blobs)


def test_uses_that_are_not_written_yet_count_when_room_is_made(store: ChunkStore) -> None:
    own(store, *SEEDS)
    store.set_max_bytes(room(2, 3, store))
    for seed in SEEDS[:2]:
        store.put_chunk(*make_chunk(seed))
    store.touch(keys(SEEDS[0]))
    store.put_chunk(*make_chunk(SEEDS[2]))
    assert with_kv(store) == keys(SEEDS[0], SEEDS[2])


def test_what_is_kept_for_a_question_is_not_evicted_for_it(store: ChunkStore) -> None:
    store.set_max_bytes(room(2, 3))
    store.put_chunks([make_chunk(seed) for seed in SEEDS[:2]])
    with pytest.raises(StoreFull, match=f"{room(2, 3):,}"):
        store.put_chunks([make_chunk(SEEDS[2])], keep=keys(*SEEDS[:2]))
    assert with_kv(store) == keys(*SEEDS[:2])


def test_a_use_of_an_evicted_chunk_is_not_noted(store: ChunkStore) -> None:
    own(store, 2)
    store.put_chunk(*make_chunk(2))
    store.set_max_bytes(RECORD)
    store.touch(keys(2))
    store.flush_touches()
    with store.read() as reader:
        assert list(reader.keys_from(b"", "lru")) == []
    assert verify(store).ok


def test_chunks_can_be_put_before_their_kv(store: ChunkStore) -> None:
    manifests = [make_chunk(seed)[0] for seed in SEEDS[:3]]
    store.put_chunk(*make_chunk(SEEDS[0]))
    assert store.put_records(manifests) == 2
    assert store.put_records(manifests) == 0
    assert with_kv(store) == keys(SEEDS[0])
    waiting = store.get_chunk(key_of(SEEDS[1]))
    assert waiting is not None
    assert not waiting.evicted, "there was no KV to evict"
    assert store.put_chunk(*make_chunk(SEEDS[1])) == "new"
    assert verify(store).without_kv == 1
    assert verify(store).ok


def test_a_record_without_kv_is_one_of_the_format_as_it_was(store: ChunkStore) -> None:
    """Earlier versions read it, and find its blobs missing, which to them is a chunk to compute."""
    own(store, 2)
    store.put_chunk(*make_chunk(2))
    whole = store.get_chunk(key_of(2))
    store.set_max_bytes(RECORD)
    with store.read() as reader:
        value = bytes(reader.get("chunks", key_of(2)))
    data, manifest = json.loads(unseal(key_of(2), value)), decode_manifest(key_of(2), value)
    assert data.keys() == json.loads(unseal(key_of(2), encode_manifest(whole))).keys()
    assert data["blob_sizes"] == [0] * manifest.num_layers
    assert manifest.blob_digests == whole.blob_digests


def test_blobs_that_no_record_counts_are_found_and_the_text_stays(store: ChunkStore) -> None:
    from cacheblend_store.format.keys import blob_key

    manifest, blobs = make_chunk(2)
    own(store, 2)
    store.put_chunk(manifest, blobs)
    store.set_max_bytes(RECORD)
    with bare_writing(store) as (txn, dbs):
        txn.put(blob_key(manifest.key, 0), blobs[0], db=dbs["blobs"])
    assert {f.kind for f in verify(store).findings} == {"blob", "counter"}
    verify(store, repair=True)
    assert verify(store).ok
    assert store.get_chunk(manifest.key).evicted


def test_a_repair_drops_the_kv_and_keeps_the_text(store: ChunkStore) -> None:
    from cacheblend_store.format.keys import blob_key

    manifest, _ = make_chunk(2)
    store.put_chunk(*make_chunk(2))
    with bare_writing(store) as (txn, dbs):
        txn.delete(blob_key(manifest.key, 1), db=dbs["blobs"])
    assert not verify(store, repair=True).ok
    assert verify(store).ok
    assert store.get_chunk(manifest.key).evicted
    assert store.put_chunk(*make_chunk(2)) == "new"


def test_prune_frees_kv_and_removes_unwanted_chunks(store: ChunkStore) -> None:
    store.put_chunks([make_chunk(seed) for seed in SEEDS[:4]])
    store.put_documents([DocumentRecord("0/a.md", COLLECTION, "d", (DocumentChunk(key_of(SEEDS[0]), 0, 0, 1),), 1.0)])
    freed = prune(store, to_bytes=2 * SIZE)
    assert (len(freed.evicted), freed.keys, freed.bytes) == (2, (), 2 * SIZE)
    assert len(list(store.chunks())) == 4
    left = with_kv(store)
    assert set(prune(store, older_than=-1, dry_run=True).evicted) == left == with_kv(store)
    assert set(prune(store, older_than=-1).evicted) == left
    assert with_kv(store) == set()
    assert prune(store, older_than=-1).evicted == ()
    assert set(prune(store, orphans=True).keys) == keys(*SEEDS[1:4])
    assert {m.key for m in store.chunks()} == keys(SEEDS[0])
    assert verify(store).ok


def test_document_records_count_in_the_quota(store: ChunkStore) -> None:
    """Long names of parts are in them, once a chunk."""
    store.put_chunks([make_chunk(seed) for seed in SEEDS[:2]])
    places = tuple(DocumentChunk(key_of(seed), i, i, i + 1, Locator("p" * SIZE)) for i, seed in enumerate(SEEDS[:2]))
    store.set_max_bytes(stats(store).quota_bytes + 1)
    assert len(with_kv(store)) == 2
    store.put_documents([DocumentRecord("own.md", COLLECTION, "digest", places, 1.0)])
    found = stats(store)
    assert found.document_bytes > 2 * SIZE
    assert not with_kv(store), "the KV made room for it"
    assert found.quota_bytes == found.text_bytes + found.document_bytes
    assert verify(store).ok


def test_stats_count_what_has_no_kv(store: ChunkStore) -> None:
    own(store, *SEEDS)
    store.put_chunks([make_chunk(seed) for seed in SEEDS[:4]])
    store.set_max_bytes(room(1, 4, store))
    found = stats(store)
    assert (found.chunks, found.without_kv) == (4, 3)
    [share] = found.models.values()
    assert (share.chunks, share.bytes) == (4, SIZE)


def test_text_counts_in_the_quota_and_text_of_no_document_goes_least_recently_used_first(store: ChunkStore) -> None:
    """Requests bring texts without end: they must not grow the store beyond its quota."""
    own(store, SEEDS[0])
    store.put_chunk(*make_chunk(SEEDS[0]))
    store.set_max_bytes(room(0, 4, store))
    for seed in SEEDS[1:]:
        assert store.put_records([make_chunk(seed)[0]]) == 1
        found = stats(store)
        assert found.quota_bytes <= room(0, 4, store)
    assert {m.key for m in store.chunks()} == keys(SEEDS[0], *SEEDS[-3:])
    assert verify(store).ok


def test_text_that_has_no_room_is_refused_unless_a_document_owns_it(store: ChunkStore) -> None:
    store.set_max_bytes(RECORD // 2)
    with pytest.raises(StoreFull):
        store.put_records([make_chunk(2)[0]])
    assert stats(store).chunks == 0
    places = (DocumentChunk(key_of(2), 0, 0, 1),)
    store.put_documents([DocumentRecord("own.md", COLLECTION, "digest", places, 1.0)], (), [make_chunk(2)[0]])
    assert [m.key for m in store.chunks()] == [key_of(2)]
    assert verify(store).ok


def test_a_store_whose_counters_know_no_texts_counts_them(store: ChunkStore) -> None:
    store.put_chunks([make_chunk(seed) for seed in SEEDS[:3]])
    with store.read() as reader:
        state = reader.state()
    with bare_writing(store) as (txn, dbs):
        old = {name: value for name, value in vars(state).items() if name not in ("text_bytes", "document_bytes")}
        txn.put(b"state", seal_json(b"state", old), db=dbs["meta"])
    assert verify(store).ok
    assert (stats(store).text_bytes, stats(store).document_bytes) == (state.text_bytes, state.document_bytes)
    store.put_chunk(*make_chunk(SEEDS[3]))
    with store.read() as reader:
        sizes = [len(reader.get("chunks", key)) for key in reader.keys_from(b"")]
        assert reader.state().text_bytes == sum(sizes)
