"""Export and import: everything travels, and nothing that was tampered with gets in."""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_store import bare_writing
from cacheblend_store import (
    ArchiveError,
    BadBlob,
    ChunkManifest,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    KeyParts,
    StoreError,
    chunk_key,
    collection_id,
    prune,
    stats,
    verify,
)
from cacheblend_store.archive import (
    ArchiveLimits,
    ArchiveOptions,
    ImportedChunk,
    export_chunks,
    import_chunks,
    importing,
)
from cacheblend_store.format.codecs import CODECS, encode_kv
from cacheblend_store.format.keys import blob_key
from children import Ended, limit_memory, outcomes
from mutations import mutate
from safetensors import safe_open
from torture import Ledger

LAYERS, HEADS, DIM, PREFIX = 3, 2, 8, (7, 8)
SECRET = b"0123456789abcdef"


def make_chunk(
    seed: int, codec: str = "float32", salt: str = "", context: str = "sink"
) -> tuple[ChunkManifest, list[bytes]]:
    """A chunk whose id is the digest of what it is made of. context "prefix": that of its collection."""
    generator = torch.Generator().manual_seed(seed)
    ids = PREFIX if context == "prefix" else tuple(torch.randint(0, 1000, (5,), generator=generator).tolist())
    parts = KeyParts("model", "tokenizer", PREFIX, (), codec, salt)
    before = () if context == "prefix" else PREFIX
    blobs = [encode_kv(*torch.randn(2, len(ids), HEADS, DIM, generator=generator), codec) for _ in range(LAYERS)]
    manifest = ChunkManifest(
        key=chunk_key(replace(parts, prefix_ids=before), ids), token_ids=ids, text=f"chunk {seed} \ud800 ü", model="model",
        model_name="m", tokenizer="tokenizer", collection=collection_id(parts), context=context, left_context_ids=(),
        collected_len=len(before) + len(ids), codec=codec, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        source=f"{seed}.md", index=0, span=(0, 4), created=1.5,
    )  # fmt: skip
    return manifest, blobs


def fill(path: Path, count: int = 4, codec: str = "float32", salt: str = "") -> ChunkStore:
    """A store of a prefix, chunks, and a document that has all but the last of them."""
    store = ChunkStore.open(path, mode="write")
    manifests = []
    for seed in range(count):
        manifest, blobs = make_chunk(seed, codec, salt)
        store.put_chunk(manifest, blobs)
        manifests.append(manifest)
    store.put_chunk(*make_chunk(99, codec, salt, "prefix"))
    places = tuple(DocumentChunk(m.key, i, 0, 4) for i, m in enumerate(manifests[:-1]))
    store.put_document(DocumentRecord("a.md", manifests[0].collection, "d", places, 2.5, {"chunk_tokens": 5}))
    return store


def content(store: ChunkStore) -> tuple[object, ...]:
    chunks = []
    for manifest in store.chunks(prefixes=True):
        with store.read() as reader:
            chunks.append((manifest, [bytes(reader.blob(manifest, i)) for i in range(LAYERS)]))
    return chunks, store.documents()


def damage(store: ChunkStore, manifest: ChunkManifest) -> None:
    """Flip a bit of one blob behind the back of its digest."""
    name = blob_key(manifest.key, 1)
    with bare_writing(store) as (txn, dbs):
        blob = bytearray(txn.get(name, db=dbs["blobs"]))
        blob[-9] ^= 1
        txn.put(name, bytes(blob), db=dbs["blobs"])


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


def files_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("codec", CODECS)
def test_everything_travels(tmp_path: Path, archive: Path, codec: str) -> None:
    with fill(tmp_path / "a", codec=codec) as store:
        report = export_chunks(store, archive)
        assert (report.chunks, report.documents, report.damaged) == (5, 1, ())
        before = content(store)
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        first = import_chunks(other, archive)
        assert (first.chunks, first.documents, first.signature, first.unproven) == ({"new": 5}, 1, "absent", 0)
        assert content(other) == before
        assert verify(other).ok
        again = import_chunks(other, archive)
        assert (again.chunks, again.documents) == ({"unchanged": 5}, 0)


def test_a_chunk_file_opens_in_safetensors(tmp_path: Path, archive: Path) -> None:
    manifest, _ = make_chunk(0)
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
        with store.read() as reader:
            expected = bytes(reader.layer(reader.undamaged(manifest.key), 1)["v"])
    file = f"{manifest.id}.safetensors"
    (tmp_path / file).write_bytes(files_of(archive)[file])
    with safe_open(tmp_path / file, "pt") as file:
        assert set(file.keys()) == {f"layers.{i}.{n}" for i in range(LAYERS) for n in "kv"}
        assert file.get_tensor("layers.1.v").numpy().tobytes() == expected


def test_a_selection_takes_its_prefix_and_documents_along(tmp_path: Path, archive: Path) -> None:
    chosen, loose = make_chunk(1)[0].key, make_chunk(3)[0].key
    prefix = make_chunk(99, context="prefix")[0].key
    with fill(tmp_path / "a") as store:
        assert export_chunks(store, archive, [chosen]).documents == 1
        assert export_chunks(store, archive, [loose], force=True).documents == 0
        export_chunks(store, archive, [chosen], force=True)
        document = store.documents()[0]
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        import_chunks(other, archive)
        assert {m.key for m in other.chunks(prefixes=True)} == {chosen, prefix}
        assert other.get_document(document.collection, "a.md") == document


def test_a_document_travels_in_each_of_its_contexts(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        [sink] = store.documents()
        store.put_document(replace(sink, chunks=sink.chunks[1:], context="neighbours"))
        export_chunks(store, archive)
        expected = content(store)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        assert import_chunks(other, archive).documents == 2
        assert content(other) == expected
        assert verify(other).ok


def test_what_is_in_the_way_is_not_replaced(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
        with pytest.raises(ArchiveError, match="is there already"):
            export_chunks(store, archive)
        export_chunks(store, archive, force=True)
        (tmp_path / "thesis").mkdir()
        with pytest.raises(ArchiveError, match="is there already"):
            export_chunks(store, tmp_path / "thesis", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "thesis", "x.tar"]


def test_a_tar_whose_end_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "whole.tar")
    size = (tmp_path / "whole.tar").stat().st_size

    def work(missing: int) -> list[str]:
        with ChunkStore.open(tmp_path / "a") as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, -1))
            with pytest.raises(OSError, match="too large"):
                export_chunks(store, tmp_path / "x.tar")
        return sorted(p.name for p in tmp_path.iterdir())

    for missing, names in outcomes(work, [1, 600, 20_000], timeout=60):
        assert names == ["a", "whole.tar"], missing


def test_damaged_chunks_stay_behind(tmp_path: Path, archive: Path) -> None:
    manifest = make_chunk(1)[0]
    with fill(tmp_path / "a") as store:
        damage(store, manifest)
        report = export_chunks(store, archive)
    assert (report.chunks, report.damaged) == (4, (manifest.key,))
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        assert import_chunks(other, archive).chunks == {"new": 4}


def test_signatures(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive, options=ArchiveOptions(sign_key=SECRET))
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(ArchiveError, match="signature is wrong"):
            import_chunks(other, archive, options=ArchiveOptions(sign_key=SECRET + b"x"))
        assert list(other.chunks()) == []
        assert import_chunks(other, archive).signature == "unchecked"
        assert import_chunks(other, archive, options=ArchiveOptions(sign_key=SECRET)).signature == "right"
        with fill(tmp_path / "a") as store:
            export_chunks(store, archive, force=True)
        with pytest.raises(ArchiveError, match="not signed"):
            import_chunks(other, archive, options=ArchiveOptions(sign_key=SECRET))


def test_a_signed_manifest_covers_the_files(tmp_path: Path, archive: Path) -> None:
    manifest, options = make_chunk(1)[0], ArchiveOptions(sign_key=SECRET)
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive, options=options)
    files = files_of(archive)
    data = bytearray(files[f"{manifest.id}.safetensors"])
    data[-3] ^= 1
    write_tar(archive, {**files, f"{manifest.id}.safetensors": bytes(data)})
    seen: list[ImportedChunk] = []
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        report = import_chunks(other, archive, options=options, on_chunk=lambda c, *_: seen.append(c))
        assert report.chunks == {"new": 4, "rejected": 1}
        assert other.get_chunk(manifest.key) is None
    assert [(c.manifest.key, "digest" in c.reason) for c in seen if c.status == "rejected"] == [(manifest.key, True)]


def test_a_salt_is_neither_written_nor_guessed(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a", salt="tenant-7") as store:
        export_chunks(store, archive, options=ArchiveOptions(salt="tenant-7"))
    assert b"tenant-7" not in archive.read_bytes()
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        for salt in ("", "tenant-8"):
            with pytest.raises(ArchiveError, match=r"salt|digest"):
                import_chunks(other, archive, options=ArchiveOptions(salt=salt))
        assert import_chunks(other, archive, options=ArchiveOptions(salt="tenant-7")).chunks == {"new": 5}


def test_without_the_prefix_ids_are_not_proven(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        store.remove_chunks([make_chunk(99, context="prefix")[0].key])
        export_chunks(store, archive)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        assert import_chunks(other, archive).unproven == 4


def test_an_interrupted_import_goes_on(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_store.archive.importing._BATCH_BYTES", 1)  # a transaction a chunk
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)

    def interrupt(chunk: ImportedChunk, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(KeyboardInterrupt):
            import_chunks(other, archive, on_chunk=interrupt)
        assert len(list(other.chunks(prefixes=True))) == 3
        report = import_chunks(other, archive)
        assert (report.chunks, report.documents) == ({"unchanged": 3, "new": 2}, 0)  # its record came first


def test_a_damaged_chunk_of_the_store_is_replaced(tmp_path: Path, archive: Path) -> None:
    manifest = make_chunk(1)[0]
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
        damage(store, manifest)
        assert import_chunks(store, archive).chunks == {"unchanged": 4, "replaced": 1}
        assert verify(store).ok


def test_another_version_of_a_document_stays_unless_asked(tmp_path: Path, archive: Path) -> None:
    last = make_chunk(3)[0]
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        own, blobs = make_chunk(50)
        other.put_chunk(own, blobs)
        mine = DocumentRecord("a.md", own.collection, "mine", (DocumentChunk(own.key, 0, 0, 4),), 9.0)
        other.put_document(mine)
        report = import_chunks(other, archive)
        assert (report.chunks, report.kept, report.documents) == ({"skipped": 3, "new": 2}, ["a.md"], 0)
        assert {m.key for m in other.chunks()} == {own.key, last.key}
        assert other.documents() == [mine]
        report = import_chunks(other, archive, replace=True)
        assert (report.chunks, report.kept, report.documents) == ({"new": 3, "unchanged": 2}, [], 1)
        assert other.get_chunk(own.key) is None


def test_a_chunk_that_moved_to_another_document_is_not_lost(tmp_path: Path, archive: Path) -> None:
    manifests = [make_chunk(seed)[0] for seed in range(3)]

    def arrange(store: ChunkStore, **seeds: tuple[int, ...]) -> None:
        records = []
        for name, numbers in seeds.items():
            places = tuple(DocumentChunk(manifests[n].key, i, 0, 4) for i, n in enumerate(numbers))
            records.append(DocumentRecord(f"{name}.md", manifests[0].collection, f"{numbers}", places, 2.5))
        store.put_documents(records)

    with ChunkStore.open(tmp_path / "a", mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(3)])
        arrange(store, a=(0, 1), b=(2,))
        export_chunks(store, archive)
        arrange(store, a=(0,), b=(1, 2))
        moved = archive.with_name(f"moved-{archive.name}")
        export_chunks(store, moved)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        import_chunks(other, archive)
        report = import_chunks(other, moved, replace=True)
        assert (report.chunks, report.documents) == ({"unchanged": 3}, 2)
        assert {m.key for m in other.chunks()} == {m.key for m in manifests}
        assert verify(other).missing == 0


@pytest.mark.parametrize("evicted", [False, True])
def test_sources_are_renamed_with_kv_and_without(tmp_path: Path, archive: Path, evicted: bool) -> None:
    with fill(tmp_path / "a") as store:
        if evicted:
            store.evict_chunks([m.key for m in store.chunks(prefixes=True)])
        export_chunks(store, archive, options=ArchiveOptions(rename=lambda name: f"portable/{name}"))
    assert b'"portable/0.md"' in archive.read_bytes()
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        import_chunks(other, archive, options=ArchiveOptions(rename=lambda name: name.replace("portable", "here")))
        assert {m.source for m in other.chunks()} == {f"here/{seed}.md" for seed in range(4)}
        assert [d.source for d in other.documents()] == ["here/a.md"]


# hostile archives


def tar_with(path: Path, add: Callable[[tarfile.TarFile], None]) -> None:
    with tarfile.open(path, "a", format=tarfile.GNU_FORMAT) as tar:
        add(tar)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(b"x"))

    return add


ID = "ab" * 20 + ".safetensors"


@pytest.mark.parametrize(
    "add",
    [
        member("../evil"), member("/etc/passwd"), member("a/../../b"), member("sub/" + ID), member("notes.txt"), member(ID),
        member("manifest.jsonl"), member(ID, tarfile.SYMTYPE, "/etc/passwd"), member(ID, tarfile.LNKTYPE, "manifest.jsonl"),
        member(ID, tarfile.CHRTYPE), member(ID, tarfile.BLKTYPE), member(ID, tarfile.FIFOTYPE), member("sub", tarfile.DIRTYPE),
        member("x" * 150), member(ID, tarfile.GNUTYPE_SPARSE), member(ID, b"x"),
    ],
)  # fmt: skip
def test_hostile_tar_members(tmp_path: Path, add: Callable[[tarfile.TarFile], None]) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "x.tar")
    tar_with(tmp_path / "x.tar", add)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(ArchiveError):
            import_chunks(other, tmp_path / "x.tar")
        assert stats(other).chunks == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "x.tar"}


def test_limits(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        size = export_chunks(store, archive).num_bytes
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        for limits in (ArchiveLimits(entries=5), ArchiveLimits(bytes=size)):
            with pytest.raises(ArchiveError, match="more than"):
                import_chunks(other, archive, options=ArchiveOptions(limits=limits))
        assert import_chunks(other, archive, options=ArchiveOptions(limits=ArchiveLimits(6, size + 20_000))).chunks == {
            "new": 5
        }


def lies() -> dict[str, Callable[[dict[str, object]], object]]:
    """What a changed manifest can say of a chunk."""
    return {
        "tokens": lambda r: r.update(token_ids=[1, 2, 3, 4, 5]),
        "id": lambda r: r.update(id="ab" * 20),
        "model": lambda r: r.update(model="other"),
        "shape": lambda r: r.update(head_dim=4, num_kv_heads=4),
        "more layers": lambda r: r.update(num_layers=4),
        "huge": lambda r: r.update(num_layers=1024, num_kv_heads=4096, head_dim=65536),
        "negative": lambda r: r.update(num_layers=-1),
        "codec": lambda r: r.update(codec="pickle"),
        "left": lambda r: r.update(left_context_ids=[1]),
        "collection": lambda r: r.update(collection="ab" * 20),
        "length": lambda r: r.update(collected_len=6),
        "prefix": lambda r: r.update(context="prefix"),
        "token": lambda r: r.update(token_ids=[1, 2, 3, 4, 1 << 40]),
        "type": lambda r: r.update(text=5),
        "field": lambda r: r.update(extra="x"),
        "created": lambda r: r.update(created=float("nan")),
        "missing": lambda r: r.pop("span"),
        "digest": lambda r: r.update(sha256="zz"),
    }


@pytest.fixture
def changed_manifest(tmp_path: Path, archive: Path) -> Iterator[Callable[[Callable[[list[bytes]], list[bytes]]], None]]:
    """Changes the lines of an export's manifest, which is then refused."""

    def change(changed: Callable[[list[bytes]], list[bytes]]) -> None:
        with fill(tmp_path / "a") as store:
            export_chunks(store, archive)
        files = files_of(archive)
        lines = changed(files["manifest.jsonl"].splitlines(keepends=True))
        write_tar(archive, {**files, "manifest.jsonl": b"".join(lines)})

    yield change
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(ArchiveError):
            import_chunks(other, archive)
        assert stats(other).chunks == 0


@pytest.mark.parametrize("lie", list(lies()))
def test_a_manifest_that_lies(changed_manifest: Any, lie: str) -> None:
    def changed(lines: list[bytes]) -> list[bytes]:
        records = [json.loads(line) for line in lines]
        lies()[lie](next(r for r in records if r["type"] == "chunk" and r["context"] == "sink"))
        return [json.dumps(r).encode() + b"\n" for r in records]

    changed_manifest(changed)


@pytest.mark.parametrize("lines", [slice(0, -1), slice(1, None), slice(0, 3), slice(0, 0), slice(None, None, -1)])
def test_a_manifest_that_lacks_lines(changed_manifest: Any, lines: slice) -> None:
    changed_manifest(lambda whole: whole[lines])


CASES = 50  # a store


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.torture)])
def test_fuzzed_archives(tmp_path: Path, count: int, ledger: Ledger) -> None:
    """Edited tars and manifests: taken in right, rejected or refused; no crash, no hang, little memory."""
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "x.tar")
        truth = {m.key: m for m in store.chunks(prefixes=True)}
    whole, files = (tmp_path / "x.tar").read_bytes(), files_of(tmp_path / "x.tar")

    def work(first: int) -> dict[str, float]:
        seen, slowest = Counter[str](), 0.0
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        with ChunkStore.open(tmp_path / "b", mode="write") as other:
            limit_memory()
            for number in range(first, first + CASES):
                target, rng = tmp_path / "fuzzed.tar", random.Random(number)
                if number % 2:
                    target.write_bytes(mutate(rng, whole))
                else:
                    write_tar(target, {**files, "manifest.jsonl": mutate(rng, files["manifest.jsonl"])})
                start = time.process_time()
                try:
                    taken = import_chunks(other, target)
                    seen["rejected" if "rejected" in taken.chunks else "taken"] += 1
                except ArchiveError:
                    seen["refused"] += 1
                slowest = max(slowest, time.process_time() - start)
            for manifest in other.chunks(prefixes=True):
                real = truth[manifest.key]
                assert manifest.token_ids == real.token_ids
                assert manifest.blob_digests == real.blob_digests
            assert verify(other).ok
        return {**seen, "slowest": slowest}

    totals, slowest = Counter[str](), 0.0
    for first, outcome in outcomes(work, range(0, count, CASES), timeout=120):
        assert not isinstance(outcome, Ended), (first, outcome)
        slowest = max(slowest, outcome.pop("slowest"))
        totals.update(outcome)
    assert sum(totals.values()) == count
    assert totals["refused"] > count / 2
    assert slowest < 1.0  # seconds of CPU to refuse one: a bound of the format, not of this machine
    ledger.add("fuzzed archives", cases=count, crashes=0, hangs=0, slowest_s=round(slowest, 4), **totals)


def test_errors_of_the_archive_are_store_errors() -> None:
    assert issubclass(ArchiveError, StoreError)
    assert not issubclass(ArchiveError, BadBlob)


def test_chunks_without_kv_travel_as_text(tmp_path: Path) -> None:
    with fill(tmp_path / "a") as store:
        store.evict_chunks([make_chunk(1)[0].key])
        report = export_chunks(store, tmp_path / "out", options=ArchiveOptions(sign_key=SECRET))
        assert (report.chunks, report.without_kv, report.damaged) == (5, 1, ())
        wanted = {m.key: (m.text, m.token_ids, m.has_kv) for m in store.chunks(prefixes=True)}
    for _ in range(2):
        with ChunkStore.open(tmp_path / "b", mode="write") as other:
            found = import_chunks(other, tmp_path / "out", options=ArchiveOptions(sign_key=SECRET))
            assert {m.key: (m.text, m.token_ids, m.has_kv) for m in other.chunks(prefixes=True)} == wanted
            assert verify(other).ok
            assert len(other.documents()) == 1
    assert found.chunks == {"unchanged": 5}


def test_exports_of_the_first_version_are_read(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
    files = files_of(archive)
    text = files["manifest.jsonl"]
    assert b'"version": 2' in text
    first = text.replace(b'"version": 2', b'"version": 1').replace(b', "context": "sink"}', b"}")
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        write_tar(archive, {**files, "manifest.jsonl": first})
        assert import_chunks(other, archive).documents == 1
        third = text.replace(b'"version": 2', b'"version": 3, "more": 1')
        write_tar(archive, {**files, "manifest.jsonl": third})
        with pytest.raises(ArchiveError, match="has version 3 and store format 1, and 2 and 1 are read"):
            import_chunks(other, archive)


def test_what_a_quota_has_no_room_for_is_imported_as_text(tmp_path: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "out")
    with ChunkStore.open(tmp_path / "b", mode="write", max_bytes=1000) as other:
        assert import_chunks(other, tmp_path / "out").chunks == {"new": 5}
        assert stats(other).live_bytes <= 1000
        assert len(list(other.chunks())) == 4
        assert verify(other).ok


def test_prune_beside_an_import_removes_nothing_of_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "out")
        wanted = {c.key for d in store.documents() for c in d.chunks}
    put, pruned = ChunkStore.put_chunks, set[bytes]()

    def put_and_prune(store: ChunkStore, *arguments: Any, **more: Any) -> Any:
        done = put(store, *arguments, **more)
        pruned.update(prune(store, orphans=True).keys)
        return done

    monkeypatch.setattr(importing, "_BATCH_BYTES", 1)
    monkeypatch.setattr(ChunkStore, "put_chunks", put_and_prune)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        import_chunks(other, tmp_path / "out")
        assert wanted <= {m.key for m in other.chunks()}
    assert pruned
    assert not pruned & wanted
