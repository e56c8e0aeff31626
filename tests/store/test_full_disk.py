"""Deleting on a disk without a free byte: prune, removal and eviction work, from the reserve and in small steps."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord, StoreNoSpace, prune, stats, verify
from cacheblend_store.lmdb_file.directory import RESERVE
from cacheblend_store.writer import StoreWriter
from small_chunks import COLLECTION, key_of, make_chunk

NUM = 120


def fill(store: ChunkStore, num_chunks: int = NUM) -> None:
    """Store documents of eight chunks each, in one commit, so that few pages are free."""
    store.put_chunks([make_chunk(seed, 600) for seed in range(num_chunks)])
    documents = [
        DocumentRecord(
            f"{a}.md", COLLECTION, "digest", tuple(DocumentChunk(key_of(i), i, i, i + 1) for i in range(a, a + 8)), 1.0
        )
        for a in range(0, num_chunks, 8)
    ]
    store.put_documents(documents)


def shrink(store: ChunkStore) -> None:
    store.set_max_bytes(stats(store).text_bytes)


WAYS: dict[str, Callable[[ChunkStore], object]] = {
    "prune": lambda store: prune(store, to_bytes=0),
    "remove": lambda store: store.remove_chunks([key_of(seed) for seed in range(NUM)]),
    "documents": lambda store: store.remove_documents([record.key for record in store.documents()]),
    "quota": shrink,
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def use_up(disk: Path) -> None:
    handle = os.open(disk / "other", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(handle, bytes(4096))
    except OSError:
        os.close(handle)
    assert os.statvfs(disk).f_bavail == 0


@pytest.mark.parametrize("way", WAYS)
def test_kv_is_freed_on_a_full_disk(small_disk: Path, way: str) -> None:
    with ChunkStore.open(small_disk / "store", mode="write", force=True) as store:
        fill(store)
    use_up(small_disk)
    with ChunkStore.open(small_disk / "store", mode="write", force=True) as store:
        WAYS[way](store)
        assert stats(store).live_bytes == 0
        assert verify(store).ok


def test_a_quota_makes_room_for_new_chunks_on_a_full_disk(small_disk: Path) -> None:
    with ChunkStore.open(small_disk / "store", mode="write", force=True) as store:
        fill(store, 400)
        store.set_max_bytes(stats(store).quota_bytes)
        use_up(small_disk)
        new = [make_chunk(seed, 600) for seed in range(400, 408)]
        assert store.put_chunks(new) == ["new"] * 8
        assert verify(store).ok


def test_the_reserve_comes_back_once_there_is_room(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        size = (store.path / RESERVE).stat().st_blocks * 512
        assert size >= 1 << 20
        (store.path / RESERVE).unlink()
    with ChunkStore.open(tmp_path / "store"):
        assert not (tmp_path / "store" / RESERVE).exists(), "reading creates nothing"
    with ChunkStore.open(tmp_path / "store", mode="write"):
        assert (tmp_path / "store" / RESERVE).stat().st_blocks * 512 == size


def test_steps_are_small_at_first_and_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, steps = StoreWriter.finish, list[int]()
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        fill(store)

        def tight(writer: StoreWriter) -> None:
            steps.append(len(writer._changes.chunks))
            if steps[-1] > 1 + 2 * len(steps):
                raise StoreNoSpace("full", "")
            finish(writer)

        monkeypatch.setattr(StoreWriter, "finish", tight)
        assert store.remove_chunks([key_of(seed) for seed in range(NUM)]) == NUM
        assert steps[:5] == [120, 1, 2, 4, 8]
        assert not (store.path / RESERVE).exists()


def test_what_to_do_is_said_when_nothing_can_be_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: StoreWriter) -> None:
        raise StoreNoSpace("the disk is full", "prune")

    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        fill(store)
        monkeypatch.setattr(StoreWriter, "finish", full)
        with pytest.raises(StoreNoSpace) as caught:
            prune(store, to_bytes=0)
        assert "another disk" in str(caught.value.hint)
        monkeypatch.undo()
        assert stats(store).live_bytes > 0
        assert verify(store).ok
