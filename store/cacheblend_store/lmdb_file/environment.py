"""The LMDB environment of a store: one a process and path, with every check before LMDB's first read.

LMDB forbids a second environment on one file in a process, use across a fork, and a changed map under open
transactions. So the stores of one process that are opened on one path share an `Environment`, which counts them and
their transactions, opens anew in a forked child, and grows its map only when no transaction is open.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lmdb

from cacheblend_store.errors import (
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreIOError,
    StoreLocked,
)
from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.datafile import (
    MAKING,
    MAP_SIZE,
    clear_making,
    fresh_folder,
    make_store,
    open_lmdb,
    put_in_place,
)
from cacheblend_store.lmdb_file.filesystem import (
    DATA,
    DATABASES,
    again_hint,
    check_file,
    check_path,
    no_store,
    read_meta,
)
from cacheblend_store.lmdb_file.forks import detach_lock_table
from cacheblend_store.lmdb_file.heap import keep_freed_memory
from cacheblend_store.lmdb_file.pages import Meta, PageReader, parse_meta
from cacheblend_store.lmdb_file.translation import MapOutgrown, Panic, translated
from cacheblend_store.lmdb_file.writeback import early_writeback

_SMALLEST_PAGE = 4096
_FORK_WAIT = 5.0  # seconds
_LEAST_WAIT = 2.0  # seconds that opening may take on a busy machine where nobody is waited for
_TRIES = 64  # at what others can make fail again and again

Opened = tuple[Any, dict[str, Any]]
"""py-lmdb's environment, and its database handles by name."""
_shared: dict[str, Environment] = {}
_inherited: list[Environment] = []  # the parent's
_gated: dict[int, list[Environment]] = {}  # by thread that is forking: those in which no other thread writes
_lost: set[str] = set()  # paths of stores that another thread of the parent was writing to
_waiting: set[str] = set()  # paths of stores that a thread still waits to open, which py-lmdb opens once a process
_registry = threading.RLock()


class Environment:
    """Made by `acquire`, given back by `release`. dbs: py-lmdb's database handles by name."""

    def __init__(self, path: Path, map_size: int, lock_timeout: float) -> None:
        self.path, self.pid, self.users = path, os.getpid(), 1
        self._map_size, self._timeout = map_size, lock_timeout
        self._changed = threading.Condition()
        self.gate = threading.RLock()  # held by the thread that writes
        self._open_transactions = self._waiting_to_remap = 0
        self._free_list_checked = False
        self._share: int | None = None
        self._file = -1  # while it is not open
        self._open()

    # opening

    def _open(self, *, anew: bool = False) -> None:
        """anew: the file may be another than the one that `check_path` looked at."""
        if str(self.path.resolve()) in _waiting:
            raise locks.being_written(self.path)
        writable = os.access(self.path / DATA, os.W_OK) and os.access(self.path, os.W_OK)
        self.readonly = not writable
        # nobody's reader slot keeps this user's snapshots: then pages are read by hand, and LMDB's map is left alone
        self.unlocked = self.readonly and not os.access(self.path / "lock.mdb", os.W_OK)
        if self._share is None:
            self._share = locks.share(self.path, self._timeout, create=writable)
        try:
            if anew:
                check_file(self.path / DATA)
            self._file = os.open(self.path / DATA, os.O_RDONLY | os.O_CLOEXEC)
            self._inode = _inode(self._file)
            self._open_lmdb()
        except BaseException:
            self._close_file()
            self._unshare()
            raise
        self._free_list_checked = False

    def _open_lmdb(self) -> None:
        """py-lmdb begins a write transaction to open what may be written, and LMDB waits for its turn without limit.

        Raises StoreLocked when a writer's transaction outlasts the time-out: it may have been stopped.
        """
        with nullcontext(True) if self.readonly else locks.unwritten(self.path) as at_once:
            self.lmdb, self.dbs = self._opened() if at_once else self._opened_in_time()

    def _opened_in_time(self) -> Opened:
        """In a thread, which waits on when this one does not any more."""
        key, answer = str(self.path.resolve()), Future[Opened]()

        def work() -> None:
            try:
                answer.set_result(self._opened())
            except BaseException as error:
                answer.set_exception(error)

        def let_go(late: Future[Opened]) -> None:
            if late.exception() is None:
                late.result()[0].close()
            _waiting.discard(key)

        thread, in_time = threading.Thread(target=work, name="store-open", daemon=True), False
        thread.start()
        try:
            in_time = bool(wait([answer], max(self._timeout, _LEAST_WAIT)).done)
        finally:
            if not in_time:
                _waiting.add(key)
                answer.add_done_callback(let_go)
        if not in_time:
            raise locks.being_written(self.path)
        thread.join()  # it has ended, but for its last steps, which no fork should copy
        return answer.result()

    def _opened(self) -> Opened:
        with translated(self.path):
            opened = open_lmdb(self.path, self._map_size, readonly=self.readonly)
            try:
                if not self.readonly:
                    opened.reader_check()
                for _ in range(_TRIES):
                    try:
                        return opened, self._handles(opened)
                    except lmdb.MapResizedError:  # another process grew the file since it was mapped
                        opened.set_mapsize(0)
                raise self._grows_too_fast()
            except (lmdb.NotFoundError, lmdb.ReadonlyError) as error:
                opened.close()
                raise no_store(self.path) from error
            except BaseException:
                opened.close()
                raise

    def _handles(self, opened: Any) -> dict[str, Any]:
        if self.readonly:
            return {name: opened.open_db(name.encode(), create=False) for name in DATABASES}
        # a transaction of our own: py-lmdb would wait for one with the interpreter's lock held
        with opened.begin(write=True) as transaction:
            return {name: opened.open_db(name.encode(), transaction, create=False) for name in DATABASES}

    def close(self) -> None:
        """Only for the process that opened it."""
        self._close_file()
        self._unshare()

    def _close_file(self) -> None:
        if self._file >= 0:
            if hasattr(self, "lmdb"):
                self.lmdb.close()
            os.close(self._file)
            self._file = -1

    def _unshare(self) -> None:
        if self._share is not None:
            os.close(self._share)
            self._share = None

    # transactions

    @contextmanager
    def reading(self) -> Iterator[tuple[Any, PageReader]]:
        """A read transaction and the checked pages of its snapshot."""
        self._follow_file(write=False)
        try:
            transaction = self._begin(write=False)
        except Panic:  # a write of another thread, or before this, could not be finished
            self.reopen()
            transaction = self._begin(write=False)
        try:
            for _ in range(_TRIES):
                try:
                    pages = self._snapshot(transaction.id())
                    break
                except _Overtaken:
                    self._end(transaction)
                    transaction = None
                    transaction = self._begin(write=False)
            else:
                raise StoreIOError(f"the store at {self.path} changes too fast to be read", "try again")
            try:
                with translated(self.path):
                    yield transaction, pages
            except StoreCorrupt as error:
                if self.unlocked and self._is_overwritten(pages.meta.txnid):
                    raise StoreIOError(
                        f"the store at {self.path} was changed by its owner while it was read", "try again"
                    ) from error
                raise
        finally:
            if transaction is not None:
                self._end(transaction)

    def _is_overwritten(self, txnid: int) -> bool:
        """Whether a snapshot that no reader slot protects may have lost pages: its second successor takes them."""
        with suppress(StoreCorrupt):
            return read_meta(self._file, self.path / DATA).txnid > txnid + 1
        return True

    @contextmanager
    def writing(self, lock_timeout: float, *, large: bool = False) -> Iterator[tuple[Any, PageReader]]:
        """A write transaction under the writer lock, and the checked pages it starts from. Durable at the end.

        large: it writes megabytes, whose memory is kept for the next one, and with which the disk begins early.
        """
        if large:
            keep_freed_memory()
        with locks.writer_lock(self.path, lock_timeout), self.gate:
            self._follow_file(write=True)
            with translated(self.path):  # a reader that was killed would keep every page freed since, while we write
                self.lmdb.reader_check()
            transaction = self._begin(write=True)
            try:
                with translated(self.path):
                    try:
                        pages = self._snapshot(transaction.id() - 1)
                        if not self._free_list_checked:
                            pages.check_free_list()
                            self._free_list_checked = True
                            clear_making(self.path)
                        yield transaction, pages
                    except BaseException:
                        transaction.abort()
                        raise
                    with early_writeback(self._file) if large else nullcontext():
                        transaction.commit()
            finally:
                self._end(None)

    def _snapshot(self, txnid: int) -> PageReader:
        try:
            meta = read_meta(self._file, self.path / DATA)
        except StoreCorrupt:
            time.sleep(0.001)  # between the reads of the two meta pages somebody committed
            meta = read_meta(self._file, self.path / DATA)
        if meta.txnid != txnid:
            older = read_older_meta(self._file, meta.page_size, txnid)
            if older is None:
                raise _Overtaken
            meta = older
        return PageReader(self._file, meta, str(self.path))

    def _begin(self, *, write: bool) -> Any:
        """A transaction, which `_end` ends and uncounts."""
        for _ in range(_TRIES):
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._waiting_to_remap, 0.1
                )  # let it; a nested one cannot wait for ever
                self._open_transactions += 1
            try:
                with translated(self.path):
                    return self.lmdb.begin(write=write, buffers=True)
            except MapOutgrown:
                self._end(None)
                self._remap(0)
            except BaseException:
                self._end(None)
                raise
        raise self._grows_too_fast()

    def _end(self, transaction: Any) -> None:
        if transaction is not None:
            with suppress(lmdb.Error):
                transaction.abort()
        with self._changed:
            self._open_transactions -= 1
            self._changed.notify_all()

    def _grows_too_fast(self) -> StoreIOError:
        return StoreIOError(f"the store at {self.path} grows too fast to be mapped", "try again")

    def grow(self) -> None:
        """A larger map, for a write that found it full. Raises StoreFull when the address space does not allow it."""
        size = self.lmdb.info()["map_size"] * 2
        if size > MAP_SIZE * 16:
            raise StoreFull(
                f"the store at {self.path} has no room in its map", "remove chunks: cacheblend chunks prune"
            )
        self._remap(size)

    def _remap(self, size: int) -> None:
        """Map `size` bytes (0: what the file has) once no transaction of this process is open."""
        with self._changed:
            self._waiting_to_remap += 1
            try:
                ready = self._changed.wait_for(lambda: self._open_transactions == 0, self._timeout)
            finally:
                self._waiting_to_remap -= 1
                self._changed.notify_all()
            if not ready:
                raise StoreFull(
                    f"the map of the store at {self.path} has to grow, and transactions of this process are in the way",
                    "end them first, or open the store with a larger map_size",
                )
            try:
                self.lmdb.set_mapsize(size)
            except lmdb.Error as error:
                self.reopen()  # LMDB has unmapped the file, and would be ended by a signal
                raise StoreFull(f"the map of {self.path} cannot grow: {error}", "free address space") from error

    # the file under it

    def _follow_file(self, *, write: bool) -> None:
        """Open anew when data.mdb is another file now. A reader goes on with the old one while others are open."""
        try:
            info = os.stat(self.path / DATA)
            same = (info.st_dev, info.st_ino) == self._inode
        except FileNotFoundError as error:
            raise StoreCorrupt(f"the store at {self.path} has lost its data.mdb", again_hint(self.path)) from error
        if info.st_size < 2 * _SMALLEST_PAGE:  # LMDB would look at the meta pages in its map, and be ended by SIGBUS
            check_file(self.path / DATA)
        if self._file < 0 or (not same and (write or self._open_transactions == 0)):
            self.reopen()

    def reopen(self) -> None:
        """Close and open again: after a failed commit, which LMDB does not go on from, or for another data.mdb."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._open_transactions == 0, self._timeout):
                raise StoreIOError(
                    f"the store at {self.path} has to be opened anew, and transactions of this process are in the way",
                    "end them, then try again",
                )
            self._close_file()
            self._open(anew=True)

    def replace_file(self, make: Callable[[Path], None]) -> None:
        """Put another data.mdb in this one's place: `make` writes it into an empty directory, data.mdb in it.

        The caller holds the writer lock. Safe against a crash at any point: a rename is the switch, and it happens
        while no other process has the store open. Raises StoreLocked when others do not leave.
        """
        if self._share is None or self.readonly:
            raise StoreIOError(f"the store at {self.path} cannot be rewritten by this user", "use a store of your own")
        with self._changed:
            if not self._changed.wait_for(lambda: self._open_transactions == 0, self._timeout):
                raise StoreLocked(f"the store at {self.path} is being read in this process", "end the readers first")
            try:
                if not locks.make_exclusive(self._share, self._timeout):
                    raise StoreLocked(
                        f"the store at {self.path} is open in other processes{self._reader_pids()}",
                        "end them, then try again",
                    )
                folder = fresh_folder(self.path / MAKING)
                try:
                    make(folder)
                    self._close_file()
                    try:
                        put_in_place(folder, self.path)
                    finally:
                        self._open(anew=True)  # the new file, or the old one
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                if self._share is not None:
                    locks.make_shared(self._share)  # after a refusal, too: flock lets go of it before it asks for more

    def _reader_pids(self) -> str:
        pids = {line.split()[0] for line in self.lmdb.readers().splitlines()[1:] if line.split()}
        others = sorted(pids - {str(os.getpid())})
        return f" ({', '.join(others[:8])})" if others else ""


class _Overtaken(Exception):
    """Two commits happened between the begin of a read transaction and the reading of its meta page."""


def acquire(path: Path, *, write: bool, create: bool, force: bool, map_size: int, lock_timeout: float) -> Environment:
    """The environment of the store at `path`: this process's own, or a new one. Raises a StoreError."""
    with _registry:
        check_path(path, write=write, create=create, force=force)
        key = str(path.resolve())
        if key in _shared:
            _shared[key].users += 1
            return _shared[key]
        while _inherited:
            inherited = _inherited.pop()
            detach_lock_table(inherited.path)
            inherited.lmdb.close()
        if key in _lost:
            raise StoreError(
                f"this process was forked while a thread of its parent wrote to the store at {path}",
                "fork when nothing is being written, or start workers with spawn or forkserver",
            )
        if not (path / DATA).exists():
            make_store(path, lock_timeout)
        _shared[key] = Environment(path, map_size, lock_timeout)
        return _shared[key]


def release(environment: Environment) -> None:
    """Give one `acquire` back; the last one closes."""
    with _registry:
        if environment.pid != os.getpid():
            return
        environment.users -= 1
        if environment.users == 0:
            for key in [k for k, e in _shared.items() if e is environment]:
                del _shared[key]
            environment.close()


def open_environment(path: Path) -> Environment | None:
    """This process's environment of the store at `path`, if it has one."""
    with _registry:
        return _shared.get(str(path.resolve()))


def read_older_meta(handle: int, page_size: int, txnid: int) -> Meta | None:
    meta = parse_meta(os.pread(handle, 4096, (txnid & 1) * page_size))
    return meta if meta is not None and meta.txnid == txnid else None


def _inode(file: int | Path) -> tuple[int, int]:
    info = os.stat(file)
    return info.st_dev, info.st_ino


def _wait_for_writers() -> None:
    """Before a fork: a write transaction of another thread could never be ended in the child."""
    deadline = time.monotonic() + _FORK_WAIT
    _gated[threading.get_ident()] = [
        e for e in list(_shared.values()) if e.gate.acquire(timeout=max(0.0, deadline - time.monotonic()))
    ]


def _let_writers_go() -> None:
    for environment in _gated.pop(threading.get_ident(), ()):
        environment.gate.release()


def _forget_after_fork() -> None:
    """A forked child leaves its parent's environments alone: their locks and reader slots are the parent's."""
    global _registry
    _registry = threading.RLock()
    gated = _gated.get(threading.get_ident(), [])
    for key, environment in _shared.items():
        with suppress(OSError):
            os.close(environment._file)
        environment._file = -1
        environment._unshare()
        if environment in gated:
            _inherited.append(environment)
        else:
            _lost.add(key)
    _shared.clear()
    _gated.clear()


os.register_at_fork(before=_wait_for_writers, after_in_parent=_let_writers_go, after_in_child=_forget_after_fork)
