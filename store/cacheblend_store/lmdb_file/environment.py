"""Transactions of one store in this process, each with the checked pages of its snapshot.

For reading, LMDB only provides a slot in its reader table, which protects the pages of the snapshot from being
overwritten; `pages` reads them. LMDB does the writing. Its environment must not be closed during a transaction, so
transactions are counted, and reopening waits until none is left.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from cacheblend_store.errors import StoreCorrupt, StoreError, StoreIOError, StorePermission
from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.datafile import Fill, clear_making, make_store, open_lmdb
from cacheblend_store.lmdb_file.directory import DATA, is_writable, open_data, unreadable
from cacheblend_store.lmdb_file.pages.commits import check_index, newest, read_metas, snapshot
from cacheblend_store.lmdb_file.pages.layout import PAGE_SIZES
from cacheblend_store.lmdb_file.pages.reader import DATABASES, PageReader
from cacheblend_store.lmdb_file.translation import Reopen, damaged, translated

_openings = itertools.count()
_TRIES = 64  # attempts to begin a transaction, which other processes can make fail repeatedly
Check = Callable[[PageReader], None]
"""Raises to refuse a data.mdb. Called each time one is opened, before LMDB."""


class Environment:
    """An open LMDB environment. Use `acquire` and `release`, which count users."""

    def __init__(self, store: Path, lock_timeout: float, check: Check, *, force: bool) -> None:
        self.store, self.pid, self.users = store, os.getpid(), 1
        self._timeout, self._check = lock_timeout, check
        self._changed = threading.Condition()
        self.transactions = self._waiting = 0
        self._file = -1  # -1: not open
        self._lmdb: Any = None
        # In a store that is not this user's own, nothing is created or locked. Without a slot in the reader table, its
        # owner may overwrite pages during a read.
        self.is_own = is_writable(store, force=force)
        self._share = locks.share(store, lock_timeout) if self.is_own else None
        try:
            self._open()
            with self.reading() as pages:
                check_index(self._file, pages)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._dbs: dict[str, Any] = {}
        self._free_list_checked = False
        self._file = open_data(self.store)
        try:
            info = os.fstat(self._file)
            self._inode, self.opening = (info.st_dev, info.st_ino), next(_openings)
            self._check_newest(self._file)
            if self.is_own:
                self._lmdb = open_lmdb(self.store)
                with translated(self.store):
                    self._lmdb.reader_check()
        except BaseException:
            self._close_file()
            raise

    def _check_newest(self, handle: int) -> None:
        """Check the meta pages, which LMDB trusts as soon as it opens the file, and which store this is."""
        try:
            self._check(newest(handle, self.store))
        except StoreCorrupt:  # no transaction protects these pages: another process may have reused them
            self._check(newest(handle, self.store))

    def close(self) -> None:
        """Close the environment. Call it only in the process that opened it."""
        self._close_file()
        if self._share is not None:
            locks.close(self._share)

    def close_lmdb(self) -> None:
        """Close LMDB's environment. Allowed in a forked child if no transaction was open."""
        if self._lmdb is not None:
            self._lmdb.close()
            self._lmdb = None

    def _close_file(self) -> None:
        self.close_lmdb()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # transactions

    @contextmanager
    def reading(self) -> Iterator[PageReader]:
        """Yield the pages of one snapshot. They do not change inside the context."""
        transaction, pages = self._begin(write=False)
        try:
            yield pages
        except StoreCorrupt as error:
            if not self.is_own and self._is_overwritten(pages.meta.txnid):
                raise StoreIOError(
                    f"the store at {self.store} was changed by its owner while it was read", "try again"
                ) from error
            raise
        finally:
            self._end(transaction)

    @contextmanager
    def writing(self, lock_timeout: float) -> Iterator[tuple[Any, dict[str, Any], PageReader]]:
        """Yield py-lmdb's write transaction, database handles by name, and the starting pages. Durable on exit."""
        with locks.writer_lock(self.store, lock_timeout):
            transaction, pages = self._begin(write=True)
            try:
                with translated(self.store):
                    if not self._free_list_checked:
                        for _ in pages.free_pages():
                            pass
                        self._free_list_checked = True
                        clear_making(self.store)
                    dbs = self._dbs or {n: self._lmdb.open_db(n.encode(), transaction, create=False) for n in DATABASES}
                    yield transaction, dbs, pages
                    self._require_own()
                    transaction.commit()
                self._dbs = dbs  # only now: LMDB discards the handles of an aborted transaction
            finally:
                self._end(transaction)

    def _begin(self, *, write: bool) -> tuple[Any, PageReader]:
        """Begin a transaction (None for a user who is not the owner), to be ended by `_end`. Returns its pages too."""
        if write and not self.is_own:
            raise StorePermission(f"the store at {self.store} is read-only for this user", "use a store of your own")
        for _ in range(_TRIES):
            self._look_at_file()
            with self._changed:
                # Waiting threads go first, with a timeout, because a transaction may begin inside another.
                self._changed.wait_for(lambda: not self._waiting, 0.1)
                self.transactions += 1
            transaction = None
            try:
                if self._file < 0:  # another thread failed to reopen it
                    raise Reopen(f"the store at {self.store} could not be opened again", "check the disk")
                with translated(self.store):
                    if write:  # a killed reader would hold every page freed since
                        self._lmdb.reader_check()
                    if self._lmdb is not None:
                        transaction = self._lmdb.begin(write=write, buffers=True)
                    commit = transaction.id() - write if transaction else None
                    pages = snapshot(self._file, self.store, commit)
                if pages is not None:
                    return transaction, pages
                # overtaken: two commits happened between begin and reading the meta page
                self._end(transaction)
            except Reopen:
                self._end(transaction)
                self.reopen()
            except BaseException:
                self._end(transaction)
                raise
        raise StoreIOError(f"the store at {self.store} changes too fast to be read", "try again")

    def _end(self, transaction: Any) -> None:
        if self.pid != os.getpid():
            # forked inside the transaction, which belongs to the parent, like its slot in the reader table
            return
        if transaction is not None:
            with suppress(lmdb.Error):
                transaction.abort()
        with self._changed:
            self.transactions -= 1
            self._changed.notify_all()

    def _look_at_file(self) -> None:
        """Check the file before LMDB reads the meta pages in its map: a truncated file would raise a signal."""
        self._require_own()
        try:
            info = os.lstat(self.store / DATA)
        except OSError as error:
            raise unreadable(self.store / DATA, error) from error
        if info.st_size < 2 * PAGE_SIZES[0]:
            raise damaged(self.store, f"its file was truncated to {info.st_size} bytes")
        if self._file < 0 or (info.st_dev, info.st_ino) != self._inode:
            self.reopen()

    def check_file(self) -> None:
        """Raise StoreError if a transaction could not begin over the file that is at the path now. Takes no lock."""
        handle = open_data(self.store)
        try:
            self._check_newest(handle)
        finally:
            os.close(handle)

    def _require_own(self) -> None:
        if self.pid != os.getpid():
            raise StoreError(
                f"this process was forked from the one that opened the store at {self.store}",
                "open it here: ChunkStore.open",
            )

    def _is_overwritten(self, txnid: int) -> bool:
        """Return whether an unprotected snapshot may have lost pages: the second commit after it reuses them."""
        with suppress(StoreCorrupt):
            return read_metas(self._file, self.store)[1].txnid > txnid + 1
        return True

    def reopen(self) -> None:
        """Reopen once no transaction of this process is open: after a failed commit, or for a new data.mdb."""
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(lambda: self.transactions == 0, self._timeout):
                    raise StoreIOError(
                        f"the store at {self.store} must be reopened, but transactions of this process are still open",
                        "end them, then try again",
                    )
                self._close_file()
                self._open()
            finally:
                self._waiting -= 1
                self._changed.notify_all()


# stores open in this process: one environment per file, because LMDB forbids a second one in a process
_shared: dict[str, Environment] = {}
_inherited: dict[str, Environment] = {}  # of the parent; kept, because LMDB closes environments on garbage collection
_registry = threading.RLock()


def acquire(store: Path, lock_timeout: float, fill: Fill, check: Check, *, force: bool) -> Environment:
    """Return the store's environment, opening or creating it if needed. The directory must have been checked.
    check: of the process's first `acquire` of this store. force: use a store of another user like an own one."""
    with _registry:
        key = str(store.resolve())
        if key in _shared:
            _shared[key].users += 1
            return _shared[key]
        if key in _inherited:  # close it: py-lmdb opens a file once per process, and counts the inherited one
            if _inherited[key].transactions:
                raise StoreError(
                    f"this process was forked while its parent read or wrote the store at {_inherited[key].store}",
                    "fork while the store is idle, or start workers with spawn or forkserver",
                )
            _inherited.pop(key).close_lmdb()
        if not os.path.lexists(store / DATA):
            make_store(store, lock_timeout, fill)
        _shared[key] = Environment(store, lock_timeout, check, force=force)
        return _shared[key]


def release(environment: Environment) -> None:
    """Undo one `acquire`; the last one closes the environment."""
    with _registry:
        if environment.pid != os.getpid():
            return
        environment.users -= 1
        if environment.users == 0:
            for key in [k for k, e in _shared.items() if e is environment]:
                del _shared[key]
            environment.close()


def _forget_after_fork() -> None:
    global _registry
    _registry = threading.RLock()
    _inherited.update(_shared)
    _shared.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
