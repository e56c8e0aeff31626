"""Lock files: one writer at a time, and exclusive access while the data file is replaced.

Both are flocks. A forked child shares them with its parent, so it closes its copies at once.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cacheblend_store.errors import StoreIOError, StoreLocked, StorePermission
from cacheblend_store.lmdb_file.directory import unreadable
from cacheblend_store.private_files import InsecurePath, open_file

WRITER, OPEN = "writer.lock", "open.lock"
_held: set[int] = set()


@contextmanager
def writer_lock(store: Path, timeout: float) -> Iterator[None]:
    """Hold the store's writer lock. The lock file names its holder. Raises StoreLocked after `timeout` seconds."""
    handle = _open(store / WRITER)
    try:
        if not _wait(handle, fcntl.LOCK_EX, timeout):
            holder = ""
            with suppress(OSError):
                holder = os.pread(handle, 300, 0).decode(errors="replace").strip()
            raise StoreLocked(
                f"the store at {store} is being written by {holder or 'another process'}",
                "wait for it, or raise --lock-timeout",
            )
        note = f"process {os.getpid()} on {os.uname().nodename} ({_command()})".encode()[:300]
        with suppress(OSError):  # the holder's name is optional: a full disk must not prevent locking
            os.pwrite(handle, note, 0)
            os.ftruncate(handle, len(note))
        yield
    finally:
        close(handle)


def share(store: Path, timeout: float) -> int:
    """Return the descriptor of a shared lock on an open store, held until `close`. Raises StoreLocked if the store is
    being rewritten for longer than `timeout` seconds."""
    handle = _open(store / OPEN)
    if not _wait(handle, fcntl.LOCK_SH, timeout):
        close(handle)
        raise StoreLocked(f"the store at {store} is being compacted", "wait for it, or raise --lock-timeout")
    return handle


@contextmanager
def nobody_else(store: Path, timeout: float) -> Iterator[None]:
    """Hold exclusive access to the store. Raises StoreLocked if others keep it open for `timeout` seconds."""
    handle = _open(store / OPEN)
    try:
        if not _wait(handle, fcntl.LOCK_EX, timeout):
            raise StoreLocked(
                f"the store at {store} is open in {_holders(store / OPEN)}",
                "end them (engines: cacheblend stop), then try again",
            )
        yield
    finally:
        close(handle)


def close(handle: int) -> None:
    """Release a lock. Does nothing in a forked child, which has released it already."""
    if handle in _held:
        _held.discard(handle)
        os.close(handle)


def _wait(handle: int, kind: int, timeout: float) -> bool:
    deadline, pause = time.monotonic() + timeout, 0.0005
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
        except OSError as error:
            close(handle)
            raise StoreIOError(f"locking the store failed: {error}", "use a local disk") from error


def _open(path: Path) -> int:
    """Open the lock file of a store that this user may write, and create it if needed."""
    try:
        handle = open_file(path, os.O_RDWR | os.O_CREAT, anywhere=True)
    except InsecurePath as error:
        raise unreadable(path, error) from error
    except OSError as error:
        raise StorePermission(f"cannot open {path}: {error.strerror}", "use a store of your own") from error
    _held.add(handle)
    return handle


def _holders(path: Path) -> str:
    """Return the holders of a lock on the file, if the system lists them."""
    pids, inode = set[str](), path.stat().st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, file, _, _ = line.split()
            if kind == "FLOCK" and file.endswith(f":{inode}"):
                pids.add(pid)
    return f"other processes ({', '.join(sorted(pids)[:8])})" if pids else "other processes"


def _command() -> str:
    return shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:2]])[:80] if sys.argv else "python"


def _close_in_child() -> None:
    for handle in list(_held):
        close(handle)


os.register_at_fork(after_in_child=_close_in_child)
