"""Layers are read in groups, in one call without the GIL, and checked; places are remembered."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, LayerReads, StoreReader, compiled_reads
from cacheblend_store.format.blobs import CODECS, BlobSpec
from cacheblend_store.format.keys import blob_key
from cacheblend_store.format.records import layer_spec
from coded_chunks import LAYERS, make_chunk


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        yield store


def places_of(specs: list[BlobSpec], gap: int = 5) -> tuple[list[dict[str, tuple[int, int]]], int]:
    """Places in a buffer, with gaps between them, and its size."""
    places, at = list[dict[str, tuple[int, int]]](), gap
    for spec in specs:
        places.append({})
        for name, tensor in spec.items():
            places[-1][name] = at, at + tensor.num_bytes
            at += tensor.num_bytes + gap
    return places, at


GROUPS = [(0, 1), (2,)]


def reads_of(manifest: ChunkManifest, groups: Sequence[Sequence[int]] = GROUPS) -> tuple[LayerReads, int]:
    """Reads of a chunk's layers, and the bytes of a buffer for the largest group."""
    places, size = places_of([layer_spec(manifest, 0)] * max(map(len, groups)))
    return LayerReads(manifest, groups, places), size


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "not compiled"])
def test_groups_of_layers_are_read_at_once_and_checked(
    store: ChunkStore, codec: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(compiled_reads, "_library", lambda: None)
    key = store_chunk(store, 1, codec)
    with store.read() as reader:
        manifest = reader.manifest(key)
        assert manifest is not None
        wanted = [{n: bytes(x) for n, x in reader.layer(manifest, i).items()} for i in range(LAYERS)]
        reads, size = reads_of(manifest)
        reader.locate(reads)
        assert reads.compiled is not None
        for number, group in reversed(list(enumerate(reads.groups))):
            buffer = memoryview(bytearray(b"\xff" * size))
            assert reads.compiled.read(reader.pages.handle, number, buffer) is compiled
            reader.read_layers(replace(reads), number, buffer)
            own = reads.places[: len(group)]
            found = [{name: bytes(buffer[a:b]) for name, (a, b) in places.items()} for places in own]
            assert found == [wanted[layer] for layer in group]
            filled = {at for places in own for a, b in places.values() for at in range(a, b)}
            assert all(buffer[at] == 0xFF for at in range(size) if at not in filled)
        whole = bytes(reader.blob(manifest, 1))
    for at in {8, len(whole) // 2, len(whole) - 1}:
        with bare_writing(store) as (txn, dbs):
            txn.put(blob_key(key, 1), whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], db=dbs["blobs"])
        with store.read() as reader, pytest.raises(BadBlob, match=manifest.id[:12]):
            located(reader, reads).read_layers(reads, 0, memoryview(bytearray(size)))
    with bare_writing(store) as (txn, dbs):
        txn.delete(blob_key(key, 2), db=dbs["blobs"])
    reads.compiled = None  # it reads what was located: the pages are not used for something else yet
    with store.read() as reader, pytest.raises(BadBlob, match="is missing"):
        located(reader, reads).read_layers(reads, 1, memoryview(bytearray(size)))


def test_reading_takes_no_read_from_python(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look-up of the blobs and the end of their digests nothing needs the GIL."""
    key = store_chunk(store, 1)
    with store.read() as reader:
        manifest = reader.manifest(key)
        assert manifest is not None
        (reads, size), seen = reads_of(manifest), list[object]()
        reader.locate(reads)
        monkeypatch.setattr(os, "preadv", lambda *of: seen.append(of))
        for group in range(len(GROUPS)):
            reader.read_layers(reads, group, memoryview(bytearray(size)))
    assert not seen


def test_layers_that_moved_since_they_were_located_are_looked_up_again(store: ChunkStore) -> None:
    key, others = store_chunk(store, 1), [store_chunk(store, seed) for seed in (2, 3)]
    with store.read() as reader:
        manifest = reader.manifest(key)
        assert manifest is not None
        reads, size = reads_of(manifest)
        reader.locate(reads)
        version, wanted = reader.version, bytes(reader.blob(manifest, 0))
    _, blobs = make_chunk(1, num_tokens=400)
    store.remove_chunks([key, *others])
    for seed in (4, 5, 6):
        store_chunk(store, seed)
    store.put_chunk(make_chunk(1, num_tokens=400)[0], blobs)
    with store.read() as reader:
        assert reader.version != version
        buffer = memoryview(bytearray(size))
        reader.read_layers(reads, 0, buffer)
        assert reads.compiled is None, "the next prompt looks them up"
        data = b"".join(bytes(buffer[a:b]) for a, b in map(reads.places[0].__getitem__, layer_spec(manifest, 0)))
        assert wanted.endswith(data)
    with store.read() as reader:
        again = reader.version
    with store.read() as reader:
        assert reader.version == again


def located(reader: StoreReader, reads: LayerReads) -> StoreReader:
    reader.locate(reads)
    return reader


def store_chunk(store: ChunkStore, seed: int, codec: str = "float32") -> bytes:
    manifest, blobs = make_chunk(seed, num_tokens=400, codec=codec)
    store.put_chunk(manifest, blobs)
    return manifest.key
