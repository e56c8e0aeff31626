"""A second precompute reads the files that changed and no others, and stores what a first one would."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore, verify
from checkpoints import write_checkpoint

from cacheblend_cli.collect import document_records
from cacheblend_cli.corpus import documents
from cacheblend_cli.corpus.documents import FileState

Cli = Callable[..., Any]
SIZE = ("--chunk-tokens", "40")


@pytest.fixture(autouse=True)
def _quiet_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' files are seconds old: only the system's tick counts as the same instant."""
    monkeypatch.setattr(documents, "_RACY_NS", 0)
    yield
    documents._reader.cache_clear()


@pytest.fixture
def read(docs: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the documents whose files are opened, in order."""
    names, read_bytes = list[str](), Path.read_bytes

    def noted(path: Path) -> bytes:
        names.append(path.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    return names


def listed(cli: Cli) -> set[tuple[str, str]]:
    return {(r["id"], r["source"]) for r in cli("chunks", "ls", "--json").records}


def is_as_new(cli: Cli, monkeypatch: pytest.MonkeyPatch, store: Path, *flags: str, docs: str = "docs") -> bool:
    """Whether the store has what a new one would have, all with KV."""
    with ChunkStore.open(store) as opened:
        assert verify(opened).ok
        assert all(m.has_kv for m in opened.chunks())
    found = listed(cli)
    with monkeypatch.context() as patched:
        patched.setenv("CACHEBLEND_STORE", str(store.parent / "new"))
        shutil.rmtree(store.parent / "new", ignore_errors=True)
        assert cli("precompute", docs, *SIZE, *flags).code == 0
        return listed(cli) == found


def again(cli: Cli, read: list[str], *arguments: str) -> tuple[list[str], str]:
    """The files that precompute reads, and what it says."""
    read.clear()
    result = cli("precompute", *(arguments or ("docs", *SIZE)))
    assert result.code == 0, result.err
    return sorted(set(read)), result.err


def test_nothing_is_read_where_nothing_changed(cli: Cli, docs: Path, read: list[str]) -> None:
    said = again(cli, read)[1]
    assert set(read) == {"alpha.md", "beta.md"}
    [before] = [line for line in said.splitlines() if "chunks:" in line]
    chunks = int(before.split(" chunks")[0].rpartition(" ")[2])
    files, said = again(cli, read)
    assert files == []
    assert f"2 documents, {chunks} chunks: {chunks} unchanged;" in said
    assert before.split(" in ")[0].split("; ")[1] == said.split(" in ")[0].split("; ")[1], "bytes of KV"
    read.clear()
    records = cli("precompute", "docs", *SIZE, "--json").records
    assert {r["status"] for r in records} == {"unchanged"}
    assert {(r["id"], r["source"]) for r in records} == listed(cli)
    assert [r["index"] for r in records] == [i for r in records for i in [r["index"]]]
    assert cli("precompute", "docs", *SIZE, "-q").out.split() == [r["id"] for r in records]
    assert read == []


def test_one_changed_file_is_read_and_no_other(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(cli, read)
    (docs / "alpha.md").write_text("# alpha\n\nsomething else entirely\n")
    assert again(cli, read)[0] == ["alpha.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store")
    assert again(cli, read)[0] == []


def test_deleted_renamed_and_moved_files(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(cli, read)
    (docs / "beta.md").unlink()
    files, said = again(cli, read)
    assert files == []
    assert "docs/beta.md is gone" in said
    assert is_as_new(cli, monkeypatch, tmp_path / "store")
    (docs / "alpha.md").rename(docs / "gamma.md")
    files, said = again(cli, read)
    assert files == ["gamma.md"]
    assert "docs/alpha.md is docs/gamma.md now" in said
    assert is_as_new(cli, monkeypatch, tmp_path / "store")
    assert again(cli, read)[0] == []
    docs.rename(tmp_path / "moved")
    assert again(cli, read, "moved", *SIZE)[0] == ["gamma.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store", docs="moved")


def test_a_file_in_the_place_of_another_is_read_though_size_and_time_are_the_same(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(cli, read)
    file = docs / "alpha.md"
    was, text = file.stat(), file.read_text()
    (tmp_path / "other").write_text(text.replace("alpha", "omega"))
    os.replace(tmp_path / "other", file)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert again(cli, read)[0] == ["alpha.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store")


def test_only_verify_files_finds_a_change_that_the_file_system_does_not_show(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = FileState.of
    monkeypatch.setattr(FileState, "of", lambda path: replace(of(path), inode=1, ctime_ns=1))
    again(cli, read)
    file = docs / "alpha.md"
    was = file.stat()
    file.write_text(file.read_text().replace("alpha", "omega"))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert again(cli, read)[0] == []
    assert not is_as_new(cli, monkeypatch, tmp_path / "store")
    assert again(cli, read, "docs", *SIZE, "--verify-files")[0] == ["alpha.md", "beta.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store")
    assert again(cli, read)[0] == []


def test_a_file_that_changed_as_it_was_read_is_read_again(
    cli: Cli, docs: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_RACY_NS", 3600 * 10**9)
    again(cli, read)
    assert again(cli, read)[0] == ["alpha.md", "beta.md"]
    old = (docs / "alpha.md").stat().st_mtime_ns - 4000 * 10**9
    of = FileState.of
    monkeypatch.setattr(FileState, "of", lambda path: replace(of(path), ctime_ns=old))
    os.utime(docs / "alpha.md", ns=(old, old))
    assert again(cli, read)[0] == ["alpha.md", "beta.md"]
    assert again(cli, read)[0] == ["beta.md"], "its state was noted anew"


def test_a_touched_file_is_read_once(cli: Cli, docs: Path, read: list[str]) -> None:
    again(cli, read)
    (docs / "alpha.md").touch()
    os.utime(docs / "beta.md", ns=(1, 1))  # as after a clock was set back
    for files in (["alpha.md", "beta.md"], []):
        found, said = again(cli, read)
        assert found == files
        assert not {"new", "replaced"} & set(said.replace(",", " ").split())


def test_links(cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docs / "link.md").symlink_to("alpha.md")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "one.md").write_text("far away one\n")
    (docs / "folder").symlink_to(tmp_path / "far")
    flags = ("docs", *SIZE, "--follow")
    again(cli, read, *flags)
    assert again(cli, read, *flags)[0] == []
    (docs / "link.md").unlink()
    (docs / "link.md").symlink_to("beta.md")
    (tmp_path / "far" / "one.md").write_text("far away two\n")
    assert again(cli, read, *flags)[0] == ["one.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store", "--follow")
    (docs / "folder").unlink()
    (docs / "folder").mkdir()
    (docs / "folder" / "one.md").write_text("near by\n")
    assert again(cli, read, *flags)[0] == ["one.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "store", "--follow")


def test_other_settings_cut_again_and_an_other_converter_reads_again(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(cli, read)
    for flags in (("--chunk-tokens", "24"), ("--overlap", "4"), ("--context", "sink"), ("--kv-dtype", "int4")):
        assert again(cli, read, "docs", *flags, "--yes")[0] == ["alpha.md", "beta.md"]
        assert again(cli, read, "docs", *flags)[0] == [], flags
    given = ("--chunk-tokens", "24", "--overlap", "4", "--context", "sink", "--kv-dtype", "int4")
    cli("chunks", "prune", "--orphans")
    assert again(cli, read, "docs", *given)[0] == []
    with monkeypatch.context() as patched:
        patched.setattr(document_records, "CUT_VERSION", 0)
        assert again(cli, read, "docs")[0] == ["alpha.md", "beta.md"]
    assert again(cli, read, "docs")[0] == ["alpha.md", "beta.md"]
    assert again(cli, read, "docs")[0] == []
    monkeypatch.setattr(documents, "READ_VERSION", 0)
    documents._reader.cache_clear()
    assert again(cli, read, "docs")[0] == ["alpha.md", "beta.md"]
    assert again(cli, read, "docs")[0] == []


def test_force_reads_and_computes_everything(cli: Cli, docs: Path, read: list[str]) -> None:
    again(cli, read)
    files, said = again(cli, read, "docs", *SIZE, "--force")
    assert files == ["alpha.md", "beta.md"]
    assert "tokens/s" in said


@pytest.mark.parametrize("flags", [(), ("--json",), ("--max-size", "1GB")])
def test_what_the_store_lost_is_computed_again(
    cli: Cli, docs: Path, tmp_path: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, removed, or damaged on the disk."""
    assert cli("precompute", "docs", *SIZE).code == 0
    ids = sorted(i for i, _ in listed(cli))

    def evict(store: ChunkStore) -> None:
        assert store.evict_chunks([bytes.fromhex(ids[0])]) == 1

    def remove(store: ChunkStore) -> None:
        assert store.remove_chunks([bytes.fromhex(ids[1])]) == 1

    for change in (evict, remove):
        with ChunkStore.open(tmp_path / "store", mode="write") as store:
            change(store)
        assert cli("precompute", "docs", *SIZE, *flags).code == 0
        assert is_as_new(cli, monkeypatch, tmp_path / "store")


@pytest.mark.parametrize("database", ["chunks", "documents", "meta"])
def test_a_flipped_bit_in_a_record_is_found_as_before(
    cli: Cli, docs: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without LMDB, so that no commit reports it."""
    assert cli("precompute", "docs", *SIZE).code == 0
    assert cli("precompute", "docs", *SIZE).code == 0
    data = (tmp_path / "store" / "data.mdb").read_bytes()
    with ChunkStore.open(tmp_path / "store") as store, store.read() as reader:
        node = max(reader.pages.nodes(database), key=lambda node: node.size)
        value = bytes(reader.pages.value(node))
    wrong = bytearray(value)
    wrong[len(wrong) // 2] ^= 1
    flipped = data.replace(value, wrong)  # in pages that are free, too
    assert flipped != data
    (tmp_path / "store" / "data.mdb").write_bytes(flipped)
    with ChunkStore.open(tmp_path / "store") as store:
        assert not verify(store).ok
    assert cli("precompute", "docs", *SIZE).code == 0
    assert is_as_new(cli, monkeypatch, tmp_path / "store")


def test_a_commit_by_an_earlier_version_is_not_trusted(cli: Cli, docs: Path, read: list[str], tmp_path: Path) -> None:
    """It evicts and drops no summary."""
    again(cli, read)
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (txn, dbs):
        txn.delete(max(bytes(k) for k in txn.cursor(db=dbs["lru"]).iternext(values=False)), db=dbs["lru"])
    assert again(cli, read)[0] == ["alpha.md", "beta.md"]
    assert again(cli, read)[0] == []


def test_a_copied_store_and_a_second_store_know_what_they_have_themselves(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(cli, read)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    (docs / "alpha.md").write_text("# alpha\n\nsomething else entirely\n")
    assert again(cli, read)[0] == ["alpha.md"]
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "second"))
    assert again(cli, read)[0] == ["alpha.md", "beta.md"]
    assert again(cli, read)[0] == []
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "copy"))
    assert again(cli, read)[0] == ["alpha.md"]
    assert is_as_new(cli, monkeypatch, tmp_path / "copy")


def test_an_interrupted_run_goes_on(
    cli: Cli, docs: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each transaction of a run that stores three changes."""
    again(cli, read)
    transact, stops = ChunkStore.transact, 0
    while True:
        for name in ("alpha", "beta", "gamma"):
            (docs / f"{name}.md").write_text(f"# {name}\n\nwho works in Bergen {stops}\n")
        left = stops

        def limited(self: ChunkStore, work: Any, lock_timeout: float | None = None) -> Any:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return transact(self, work, lock_timeout)

        with monkeypatch.context() as patched:
            patched.setattr(ChunkStore, "transact", limited)
            code = cli("precompute", "docs", *SIZE).code
        if code == 0:
            break
        assert code == 130
        with ChunkStore.open(tmp_path / "store") as store:
            assert verify(store).ok
        assert cli("precompute", "docs", *SIZE).code == 0
        assert is_as_new(cli, monkeypatch, tmp_path / "store")
        stops += 1
    assert stops >= 3
    assert again(cli, read)[0] == []


def test_documents_of_two_models_are_read_once(cli: Cli, docs: Path, read: list[str], tmp_path: Path) -> None:
    """And cut for each."""
    again(cli, read)
    other = tmp_path / "other"
    write_checkpoint(other, "qwen2", max_position_embeddings=1024, intermediate_size=16)
    again(cli, read, "docs", *SIZE, "--model", str(other))
    assert sorted(read) == ["alpha.md", "beta.md"], "to cut them"
    for flags in ((), ("--model", str(other))):
        assert again(cli, read, "docs", *SIZE, *flags)[0] == []
