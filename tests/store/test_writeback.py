"""Large commits tell the disk to begin early; what is stored, and what fails, is the same without."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from cacheblend_store import store as store_module
from cacheblend_store.lmdb_file import environment, writeback
from small_chunks import make_chunk, read_chunk

CHUNKS = [make_chunk(seed) for seed in range(8)]


def _put_and_read(path: Path) -> bool:
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks(CHUNKS)
    with ChunkStore.open(path) as store, store.read() as reader:
        found = [reader.manifest(manifest.key) for manifest, _ in CHUNKS]
        return [read_chunk(reader, m) for m in found if m] == [(seed, 0) for seed in range(len(CHUNKS))]


@pytest.fixture(autouse=True)
def _every_commit_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LARGE", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is Linux's")
def test_the_disk_is_told_while_a_commit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, again = [], threading.Event()

    def begin(handle: int, offset: int, num_bytes: int, flags: int) -> int:
        told.append((offset, num_bytes, flags))
        again.set()
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", lambda: begin)
    with (tmp_path / "file").open("wb") as stream, writeback.early_writeback(stream.fileno()):
        assert again.wait(10)
    assert set(told) == {(0, 0, 2)}
    assert not [t for t in threading.enumerate() if t.name == "early-writeback"]


@pytest.mark.parametrize(("large", "commits"), [(0, 1), (1 << 30, 0)])
def test_of_large_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, commits: int) -> None:
    begun = []

    @contextmanager
    def early_writeback(handle: int) -> Iterator[None]:
        begun.append(os.fstat(handle).st_ino)
        yield

    monkeypatch.setattr(store_module, "_LARGE", large)
    monkeypatch.setattr(environment, "early_writeback", early_writeback)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        begun.clear()
        store.put_chunks(CHUNKS)
    assert begun == [(tmp_path / "store" / "data.mdb").stat().st_ino] * commits


def test_without_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: None)
    assert _put_and_read(tmp_path / "store")


def test_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert _put_and_read(tmp_path / "store")


def test_a_call_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: lambda *_: -1)
    assert _put_and_read(tmp_path / "store")
    with pytest.raises(ZeroDivisionError), writeback.early_writeback(0):
        raise ZeroDivisionError
    assert not [t for t in threading.enumerate() if t.name == "early-writeback"]
