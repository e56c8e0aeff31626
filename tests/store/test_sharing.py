"""One store, many users of it: forks, workers of a data loader, a second open, another user, a network's disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreError, StoreFormat, StoreFull, StoreLocked, StorePermission
from cacheblend_store.format.records import use_record
from cacheblend_store.lmdb_file import filesystem as store_filesystem
from cacheblend_store.lmdb_file.environment import open_environment
from cacheblend_store.lmdb_file.filesystem import filesystem_type
from cacheblend_store.lmdb_file.locks import writer_lock
from cacheblend_store.lmdb_file.pages import Meta
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
        with pytest.raises(StorePermission, match="reading only"):
            reading.put_chunk(*make_chunk(501))
    assert seed_of(store, 500) == 500
    link = store.path.parent / "link"
    link.symlink_to(store.path)
    with ChunkStore.open(link) as linked:
        assert linked._environment() is store._environment()
    assert open_environment(store.path) is not None


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
    assert store.verify().ok


# compaction


def test_a_refused_compaction_still_says_that_the_store_is_open(store: ChunkStore) -> None:
    """The lock is lost when it cannot be made exclusive: another process would swap the file under this one."""

    def stay(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(store.path):
            acknowledge()
            time.sleep(60)

    other = Child(stay)
    try:
        other.until(1)
        store._environment()._timeout = 0.05
        with pytest.raises(StoreLocked, match="open in other processes"):
            store.compact()
    finally:
        other.kill()
    handle = os.open(store.path / "open.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    store.compact()
    assert seed_of(store, 3) == 3


# writers that do not move


def hold(path: Path) -> Callable[[Callable[[], None]], None]:
    def work(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(path, mode="write") as store, store._writing():
            acknowledge()
            time.sleep(60)

    return work


@pytest.mark.parametrize("mode", ["read", "write"])
def test_opening_beside_a_writer_that_was_stopped_ends(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_store.lmdb_file.environment._LEAST_WAIT", 0.2)
    path = tmp_path / "store"
    ChunkStore.open(path, mode="write").close()
    writer = Child(hold(path))

    def work(_: int) -> str:
        with pytest.raises(StoreLocked) as refused:
            ChunkStore.open(path, mode=mode, lock_timeout=0.2)  # type: ignore[arg-type]
        return refused.value.message

    try:
        writer.until(1)
        [(_, message)] = outcomes(work, [0], timeout=10)
    finally:
        writer.kill()
    assert f"process {writer.pid} " in message


def test_a_store_opens_once_a_stopped_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that was refused before, whose first attempt LMDB lets wait still."""
    monkeypatch.setattr("cacheblend_store.lmdb_file.environment._LEAST_WAIT", 0.2)
    path = tmp_path / "store"
    ChunkStore.open(path, mode="write").close()
    writer = Child(hold(path))

    def work(acknowledge: Callable[[], None]) -> None:
        for timeout in (0.1, 0.1):
            with pytest.raises(StoreLocked):
                ChunkStore.open(path, mode="write", lock_timeout=timeout)
        acknowledge()
        deadline = time.monotonic() + 20
        while True:
            try:
                ChunkStore.open(path, mode="write", lock_timeout=1).close()
                return
            except StoreLocked:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    try:
        writer.until(1)
        refused = Child(work)
        refused.until(1)
    finally:
        writer.kill()
    assert refused.wait(30) == (0, 1)


def test_opening_does_not_count_as_waiting(store: ChunkStore) -> None:
    store.close()
    with ChunkStore.open(store.path, mode="write", lock_timeout=0) as again:
        assert seed_of(again, 1) == 1


def test_opening_waits_for_transactions_and_not_for_the_lock(store: ChunkStore) -> None:
    with writer_lock(store.path, 5):  # as `verify` holds it for as long as it reads the file

        def work(_: int) -> str:
            with ChunkStore.open(store.path, mode="write", lock_timeout=0.5) as again:
                with pytest.raises(StoreLocked, match=str(os.getppid())):
                    again.put_chunk(*make_chunk(500))
                return again.identity

        assert list(outcomes(work, [0], timeout=30)) == [(0, store.identity)]


# address space


def test_a_map_that_cannot_grow_leaves_a_store_that_reads(tmp_path: Path) -> None:
    """LMDB unmaps the file before it maps it larger."""

    def work(_: int) -> list[str]:
        with ChunkStore.open(tmp_path / "store", mode="write", map_size=1 << 20) as store:
            store.put_chunk(*make_chunk(1))
            limit_memory()
            said = []
            for _attempt in range(2):
                environment = store._environment()
                with pytest.raises(StoreFull) as refused:
                    environment._remap(1 << 40)
                said.append(refused.value.message)
                assert seed_of(store, 1) == 1
            store.put_chunk(*make_chunk(2))
            assert seed_of(store, 2) == 2
        return said

    [(_, said)] = outcomes(work, [0], timeout=30)
    assert not isinstance(said, Ended), said
    assert all("cannot grow" in message for message in said)


# forks


def fork(work: Callable[[], object]) -> None:
    child = Child(lambda acknowledge: work())
    assert child.wait(30)[0] == 0


def test_a_child_forked_inside_a_transaction_has_its_own(store: ChunkStore) -> None:
    """And leaves the parent's as it was: the slot in the reader table, the map and the locks."""
    with store.read() as reader:
        manifest = reader.manifest(key_of(3))
        assert manifest is not None

        def work() -> None:
            assert seed_of(store, 3) == 3
            store.remove_chunks([key_of(3)])
            store.put_chunk(*make_chunk(700))

        slots = store._environment().lmdb.readers()
        fork(work)
        assert store._environment().lmdb.readers() == slots, "the child freed its parent's place among the readers"
        for version in range(8):  # which would let these take the pages of the snapshot
            store.put_chunks([make_chunk(seed, version + 1) for seed in range(4, COUNT)])
        assert read_chunk(reader, manifest) == (3, 0)
    assert store.get_chunk(key_of(3)) is None
    assert seed_of(store, 700) == 700


def test_a_fork_waits_for_a_thread_that_writes(store: ChunkStore) -> None:
    """Its transaction could never be ended in the child."""
    writing = threading.Event()

    def write() -> None:
        with store._writing() as (txn, dbs):
            writing.set()
            time.sleep(0.2)  # long enough to be forked in, were that possible
            txn.put(key_of(0), use_record(key_of(0), 1.0), db=dbs["lru"])

    thread = threading.Thread(target=write)
    thread.start()
    writing.wait(30)
    fork(lambda: seed_of(store, 1))
    fork(lambda: store.put_chunk(*make_chunk(800)))
    thread.join()
    assert seed_of(store, 800) == 800
    assert store.verify().ok


def test_a_child_of_a_writer_that_does_not_end_says_so(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_store.lmdb_file.environment._FORK_WAIT", 0.05)
    writing, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store._writing():
            writing.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    writing.wait(30)

    def refused() -> None:
        with pytest.raises(StoreError, match="forked while a thread") as error:
            seed_of(store, 1)
        assert "spawn" in str(error.value.hint)

    try:
        fork(refused)
    finally:
        done.set()
        thread.join()
    assert seed_of(store, 1) == 1


def test_a_grandchild_reads_and_the_parents_are_untouched(store: ChunkStore) -> None:
    def work() -> None:
        assert seed_of(store, 5) == 5
        fork(lambda: store.put_chunk(*make_chunk(900)))
        assert seed_of(store, 900) == 900

    fork(work)
    assert seed_of(store, 900) == 900
    assert store._environment().lmdb.reader_check() == 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_read_what_the_parent_opened(store: ChunkStore, start: str) -> None:
    loader = DataLoader(
        ChunkDataset(store, COUNT), batch_size=5, num_workers=2 if start == "fork" else 1, persistent_workers=True,
        multiprocessing_context=start,
    )  # fmt: skip
    for round_ in range(2):
        assert sorted(n for batch in loader for n in batch.tolist()) == list(range(COUNT))
        store.put_chunks([make_chunk(seed, round_ + 1) for seed in range(COUNT)])  # while they live
    del loader
    assert store.verify().ok


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
            assert store.verify().ok
            store.touch([key_of(1)])
        with pytest.raises(StorePermission) as refused:
            ChunkStore.open(foreign, mode="write")
        with pytest.raises(StorePermission):
            ChunkStore.repair(foreign)
        assert {f: f.stat().st_mtime_ns for f in foreign.iterdir()} == before
        return [len(found), refused.value.message, refused.value.hint]

    count, message, hint = as_nobody(work)  # type: ignore[misc]
    assert count == COUNT
    assert "belongs to another user" in message
    assert hint


@pytest.mark.parametrize("file", ["data.mdb", ".", ".."])
def test_a_store_that_may_not_be_read_says_so(foreign: Path, file: str) -> None:
    (foreign / file).chmod(0o600)

    def work() -> str:
        with pytest.raises(StorePermission) as refused:
            ChunkStore.open(foreign)
        with pytest.raises(StorePermission):
            ChunkStore.repair(foreign)
        return refused.value.message

    assert "cannot read" in str(as_nobody(work))


def test_a_store_of_somebody_else_is_read_while_its_owner_writes(foreign: Path) -> None:
    """No reader slot protects the snapshots of a user who may not write lock.mdb: never wrong data, never a signal."""

    def write(acknowledge: Callable[[], None]) -> None:
        with ChunkStore.open(foreign, mode="write") as store:
            for version in range(1, 10_000):
                store.put_chunks([make_chunk(seed, version) for seed in range(version % 3, COUNT, 3)])

    def work() -> list[int]:
        good = overtaken = 0
        with ChunkStore.open(foreign) as store:
            while good < 40:
                try:
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
    assert filesystem_type(Path(path), tmp_path / "mountinfo") == kind


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "lustre"])
def test_a_networks_disk_is_refused_unless_forced(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(store_filesystem, "filesystem_type", lambda path: kind)
    for mode in ("read", "write"):
        with pytest.raises(StoreFormat, match=f"network filesystem.*{kind}") as refused:
            ChunkStore.open(store.path, mode=mode)  # type: ignore[arg-type]
        assert refused.value.hint
    with pytest.raises(StoreFormat, match="network"):
        ChunkStore.open(store.path.parent / "new", mode="write")
    with ChunkStore.open(store.path, mode="write", force=True) as forced:
        forced.put_chunk(*make_chunk(950))


def test_commits_of_others_while_the_file_is_looked_at(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may put other data where the list of databases was, which is no reason to call the file another's."""
    check, looks = store_filesystem._check_pages, list[int]()

    def overtaken(handle: int, data: Path) -> Meta:
        looks.append(len(looks))
        if len(looks) < 4:
            store.put_chunks([make_chunk(COUNT + len(looks))])
            raise StoreFormat("what was read is of another commit")
        return check(handle, data)

    monkeypatch.setattr(store_filesystem, "_check_pages", overtaken)
    store_filesystem.check_file(store.path / "data.mdb")
    assert len(looks) == 4
