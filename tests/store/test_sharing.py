"""One store, many users of it: forks, workers of a data loader, a second open, another user, a network's disk."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import (
    ChunkStore,
    StoreError,
    StoreFormat,
    StoreFull,
    StoreLocked,
    StorePermission,
    compact,
    salvage,
    verify,
)
from cacheblend_store.lmdb_file import datafile, directory
from cacheblend_store.lmdb_file.locks import writer_lock
from children import Child, Ended, limit_memory, outcomes
from chunk_dataset import ChunkDataset
from small_chunks import key_of, make_chunk, read_chunk, read_contents
from torch.utils.data import DataLoader

NOBODY = 65534
COUNT = 24


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(COUNT)])
        yield store


def seed_of(store: ChunkStore, seed: int) -> int:
    with store.read() as reader:
        manifest = reader.manifest(key_of(seed))
        assert manifest is not None
        return read_chunk(reader, manifest)[0]


# one process


def test_a_second_open_shares_the_environment(store: ChunkStore) -> None:
    with ChunkStore.open(store.path) as reading, ChunkStore.open(store.path, mode="write") as other:
        assert reading._environment() is store._environment() is other._environment()
        other.put_chunk(*make_chunk(500))
        assert seed_of(reading, 500) == 500
        with pytest.raises(StorePermission, match=str(store.path)):
            reading.put_chunk(*make_chunk(501))
    assert seed_of(store, 500) == 500
    link = store.path.parent / "link"
    link.symlink_to(store.path)
    with ChunkStore.open(link) as linked:
        assert linked._environment() is store._environment()


def test_threads_share_a_store(store: ChunkStore) -> None:
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(30):
                assert seed_of(store, (number * 7 + n) % COUNT) == (number * 7 + n) % COUNT
                if n % 10 == 0:
                    store.put_chunk(*make_chunk(600 + number, n))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert verify(store).ok


# compaction


def test_a_refused_compaction_still_says_that_the_store_is_open(store: ChunkStore) -> None:
    """And goes on: another process must not swap the file under this one."""

    def stay(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(store.path):
            acknowledge()
            time.sleep(60)

    other = Child(stay)
    try:
        other.until(1)
        store.lock_timeout = 0.05
        with pytest.raises(StoreLocked, match=f"open in other processes .*{other.pid}"):
            compact(store)
    finally:
        other.kill()
    handle = os.open(store.path / "open.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    compact(store)
    assert seed_of(store, 3) == 3


# writers that do not move


def hold(path: Path) -> Callable[[Callable[[], None]], None]:
    def work(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(path, mode="write") as store, bare_writing(store):
            acknowledge()
            time.sleep(60)

    return work


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_store_opens_and_reads_beside_a_writer_that_was_stopped(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "store"
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunk(*make_chunk(1))
    writer = Child(hold(path))

    def work(_: int) -> str:
        with ChunkStore.open(path, mode=mode, lock_timeout=0.2) as store:  # type: ignore[arg-type]
            assert seed_of(store, 1) == 1
            with pytest.raises((StoreLocked, StorePermission)) as refused:
                store.put_chunk(*make_chunk(2))
        return refused.value.message

    try:
        writer.until(1)
        [(_, message)] = outcomes(work, [0], timeout=10)
    finally:
        writer.kill()
    assert (f"process {writer.pid} " if mode == "write" else "reading only") in message


def test_opening_does_not_wait_for_the_writer_lock(store: ChunkStore) -> None:
    with writer_lock(store.path, 5):

        def work(_: int) -> str:
            with ChunkStore.open(store.path, mode="write", lock_timeout=0) as again:
                with pytest.raises(StoreLocked, match=str(os.getppid())):
                    again.put_chunk(*make_chunk(500))
                return again.identity

        assert list(outcomes(work, [0], timeout=30)) == [(0, store.identity)]


# address space


def test_a_store_that_outgrows_the_address_space_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps what it had; who has a smaller map than another writer is told so, too."""
    path, many = tmp_path / "store", [make_chunk(seed) for seed in range(150)]
    monkeypatch.setattr(datafile, "MAP_SIZE", 256 << 10)
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunk(*make_chunk(1))
        for _ in range(2):
            with pytest.raises(StoreFull) as refused:
                store.put_chunks(many)
            assert "ulimit" in str(refused.value.hint)
            assert seed_of(store, 1) == 1
        store.put_chunk(*make_chunk(2))

        def grow(_: int) -> int:
            datafile.MAP_SIZE = 1 << 30
            with ChunkStore.open(path, mode="write") as other:
                other.put_chunks(many)
                return seed_of(other, 100)

        assert list(outcomes(grow, [0], timeout=30)) == [(0, 100)]
        with pytest.raises(StoreFull, match=str(path)):
            seed_of(store, 1)
    with ChunkStore.open(path) as store:
        assert seed_of(store, 2) == 2


def test_a_process_with_little_address_space_opens_the_store(store: ChunkStore) -> None:
    def work(_: int) -> int:
        limit_memory()
        with ChunkStore.open(store.path, mode="write") as own:
            own.put_chunk(*make_chunk(700))
            return seed_of(own, 700)

    assert list(outcomes(work, [0], timeout=30)) == [(0, 700)]


# forks


def fork(work: Callable[[], object]) -> None:
    child = Child(lambda acknowledge: work())
    assert child.wait(30)[0] == 0


def test_a_store_used_in_a_forked_child_says_to_open_it_there(store: ChunkStore) -> None:
    def work() -> None:
        for use in (lambda: seed_of(store, 3), lambda: store.put_chunk(*make_chunk(700))):
            with pytest.raises(StoreError, match=str(store.path)) as refused:
                use()
            assert "ChunkStore.open" in str(refused.value.hint)
        with ChunkStore.open(store.path, mode="write") as own:
            assert seed_of(own, 3) == 3
            own.put_chunk(*make_chunk(700))
            fork(lambda: ChunkStore.open(store.path).close())
            assert seed_of(own, 700) == 700
        store.close()

    fork(work)
    assert seed_of(store, 700) == 700
    assert store._environment()._lmdb.reader_check() == 0
    assert verify(store).ok


def test_a_child_forked_inside_a_transaction_leaves_it_alone(store: ChunkStore) -> None:
    """The slot in the reader table, the map and the locks are the parent's, whatever the child does."""
    with store.read() as reader:
        manifest = reader.manifest(key_of(3))
        assert manifest is not None

        def work() -> None:
            with pytest.raises(StoreError, match=str(store.path)) as refused:
                ChunkStore.open(store.path)
            assert "spawn" in str(refused.value.hint)

        slots = store._environment()._lmdb.readers()
        fork(work)
        assert store._environment()._lmdb.readers() == slots, "the child freed its parent's place among the readers"
        for version in range(8):  # which would let these take the pages of the snapshot
            store.put_chunks([make_chunk(seed, version + 1) for seed in range(4, COUNT)])
        assert read_chunk(reader, manifest) == (3, 0)


def test_a_child_that_leaves_its_parents_transaction_does_not_end_it(store: ChunkStore) -> None:
    child = -1
    slots = ""
    try:
        with store.read() as reader:
            slots = store._environment()._lmdb.readers()
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                assert store._environment()._lmdb.readers() == slots
                assert reader.manifest(key_of(3)) is not None
    finally:
        if child == 0:
            os._exit(0)


def test_a_child_does_not_hold_its_parents_locks(store: ChunkStore) -> None:
    def wait(acknowledge: Callable[[], None]) -> None:
        acknowledge()
        time.sleep(60)

    with writer_lock(store.path, 5):
        child = Child(wait)
        child.until(1)
    try:
        store.put_chunk(*make_chunk(800))
        compact(store)
    finally:
        child.kill()
    assert seed_of(store, 800) == 800


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_workers_of_a_data_loader_open_the_store_for_themselves(store: ChunkStore, start: str) -> None:
    loader = DataLoader(
        ChunkDataset(store.path, COUNT), batch_size=5, num_workers=2 if start == "fork" else 1, persistent_workers=True,
        multiprocessing_context=start,
    )  # fmt: skip
    for round_ in range(2):
        assert sorted(n for batch in loader for n in batch.tolist()) == list(range(COUNT))
        store.put_chunks([make_chunk(seed, round_ + 1) for seed in range(COUNT)])  # while they live
    del loader
    assert verify(store).ok


# another user


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A store of this user's that everybody may read, and nobody else write."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        path = folder / "store"
        with ChunkStore.open(path, mode="write") as store:
            store.put_chunks([make_chunk(seed) for seed in range(COUNT)])
        path.chmod(0o755)
        for file in path.iterdir():
            file.chmod(0o644)
        yield path
    finally:
        shutil.rmtree(folder)


def as_nobody(work: Callable[[], object]) -> object:
    def task(_: int) -> object:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return work()

    [(_, outcome)] = outcomes(task, [0], timeout=60)
    assert not isinstance(outcome, Ended), outcome
    return outcome


def test_a_store_of_somebody_else_is_read_and_not_written(foreign: Path) -> None:
    def work() -> list[object]:
        before = {f: f.stat().st_mtime_ns for f in foreign.iterdir()}
        with ChunkStore.open(foreign) as store:
            found = read_contents(store).chunks
            assert verify(store).ok
            store.touch([key_of(1)])
        with pytest.raises(StorePermission) as refused:
            ChunkStore.open(foreign, mode="write")
        with pytest.raises(StorePermission):
            salvage(foreign)
        assert {f: f.stat().st_mtime_ns for f in foreign.iterdir()} == before
        return [len(found), refused.value.message, refused.value.hint]

    count, message, hint = as_nobody(work)  # type: ignore[misc]
    assert count == COUNT
    assert str(foreign) in message
    assert hint


@pytest.mark.parametrize("file", ["data.mdb", ".", ".."])
def test_a_store_that_may_not_be_read_says_so(foreign: Path, file: str) -> None:
    (foreign / file).chmod(0o600)

    def work() -> str:
        with pytest.raises(StorePermission) as refused:
            ChunkStore.open(foreign)
        with pytest.raises(StorePermission):
            salvage(foreign)
        return refused.value.message

    assert str(foreign) in str(as_nobody(work))


def test_a_store_of_somebody_else_is_read_while_its_owner_writes(foreign: Path) -> None:
    """No reader slot protects the snapshots of a user who may not write: never wrong data, never a signal."""

    def write(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(foreign, mode="write") as store:
            for version in range(1, 10_000):
                store.put_chunks([make_chunk(seed, version) for seed in range(version % 3, COUNT, 3)])

    def work() -> list[int]:
        good = overtaken = 0
        while good < 40:
            try:
                with ChunkStore.open(foreign) as store:
                    while good < 40:
                        assert len(read_contents(store).chunks) == COUNT
                        good += 1
            except StoreError:
                overtaken += 1
        return [good, overtaken]

    writer = Child(write)
    try:
        assert as_nobody(work)[0] == 40  # type: ignore[index]
    finally:
        writer.kill()


# filesystems


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:44 / /mnt/far rw,relatime shared:9 - nfs4 host:/x rw
31 30 0:45 / /mnt/far/near rw,relatime - tmpfs tmpfs rw
32 22 0:46 / /mnt/a\\040b rw - fuse.sshfs host:/y rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/home/x", "ext4"), ("/mnt/far/s", "nfs4"), ("/mnt/far", "nfs4"), ("/mnt/farther", "ext4"), ("/mnt/far/near/s", "tmpfs"),
     ("/mnt/a b/s", "fuse.sshfs")],
)  # fmt: skip
def test_the_filesystem_is_that_of_the_nearest_mount(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert directory.filesystem_type(Path(path), tmp_path / "mountinfo") == kind


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "lustre"])
def test_a_networks_disk_is_refused_unless_forced(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(directory, "filesystem_type", lambda path: kind)
    for mode in ("read", "write"):
        with pytest.raises(StoreFormat, match=kind) as refused:
            ChunkStore.open(store.path, mode=mode)  # type: ignore[arg-type]
        assert refused.value.hint
    with pytest.raises(StoreFormat, match=kind):
        ChunkStore.open(store.path.parent / "new", mode="write")
    with ChunkStore.open(store.path, mode="write", force=True) as forced:
        forced.put_chunk(*make_chunk(950))


def test_many_stores_leave_address_space_for_others(tmp_path: Path) -> None:
    """A map is no larger than its store can get, so that a process can open many and still start threads."""
    stores = [ChunkStore.open(tmp_path / str(n), mode="write") for n in range(24)]
    try:
        reserved = mmap.mmap(
            -1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ
        )  # MAP_NORESERVE
        reserved.close()
        for n, store in enumerate(stores):
            store.put_chunk(*make_chunk(n))
    finally:
        for store in stores:
            store.close()
