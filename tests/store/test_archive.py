"""Export and import: everything travels."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from archives import LAYERS, content, damage, files_of, fill, make_chunk, write_tar
from cacheblend_store import (
    ArchiveError,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    prune,
    stats,
    verify,
)
from cacheblend_store.archive import (
    ArchiveOptions,
    ImportedChunk,
    export_chunks,
    import_chunks,
    importing,
)
from cacheblend_store.format.codecs import CODECS
from children import outcomes
from safetensors import safe_open

SECRET = b"0123456789abcdef"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


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
        store.put_documents([replace(sink, chunks=sink.chunks[1:], context="neighbours")])
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
        other.put_documents([mine])
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


def test_exports_of_other_versions_are_refused(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, archive)
    files = files_of(archive)
    other_version = files["manifest.jsonl"].replace(b'"version": 3', b'"version": 4, "more": 1')
    write_tar(archive, {**files, "manifest.jsonl": other_version})
    wanted = "has version 4 and store format 2, and 3 and 2 are read"
    with ChunkStore.open(tmp_path / "b", mode="write") as other, pytest.raises(ArchiveError, match=wanted):
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
