"""Lock files: one writer at a time, and nobody else when the file is swapped."""

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

WRITER, OPEN = "writer.lock", "open.lock"
_held: set[int] = set()  # descriptors of exclusive locks, which a forked child must let go of


@contextmanager
def writer_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold the store's writer lock, which names its holder. Raises StoreLocked after `timeout` seconds."""
    handle = _open(path / WRITER, os.O_RDWR | os.O_CREAT)
    pid = os.getpid()
    _held.add(handle)
    try:
        if not _wait(handle, fcntl.LOCK_EX, timeout):
            raise being_written(path)
        note = f"process {pid} on {os.uname().nodename} ({_command()})".encode()[:300]
        with suppress(OSError):  # the name of the holder is a courtesy: a full disk must not stop the lock
            os.pwrite(handle, note, 0)
            os.ftruncate(handle, len(note))
        yield
    finally:
        if pid == os.getpid():  # a child forked in here has let go already
            _held.discard(handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


@contextmanager
def unwritten(path: Path) -> Iterator[bool]:
    """Whether nobody holds the writer lock just now; when nobody does, nobody gets it meanwhile."""
    try:
        handle = _open(path / WRITER, os.O_RDWR | os.O_CREAT)
    except StorePermission:
        yield False
        return
    pid = os.getpid()
    _held.add(handle)
    try:
        yield _wait(handle, fcntl.LOCK_SH, 0.0)
    finally:
        if pid == os.getpid():
            _held.discard(handle)
            os.close(handle)


def being_written(path: Path) -> StoreLocked:
    """What to raise for whoever waited too long for the writer, whose name is in the lock file."""
    holder = ""
    with suppress(OSError):
        holder = (path / WRITER).read_bytes()[:300].decode(errors="replace").strip()
    return StoreLocked(
        f"the store at {path} is being written by {holder or 'another process'}", "wait for it, or raise --lock-timeout"
    )


def share(path: Path, timeout: float, *, create: bool) -> int | None:
    """A descriptor that says "open here" for as long as it is open; None where this user cannot have one.

    Raises StoreLocked when the store is being compacted for longer than `timeout` seconds.
    """
    try:
        handle = os.open(path / OPEN, (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        if not _wait(handle, fcntl.LOCK_SH, timeout):
            raise StoreLocked(f"the store at {path} is being compacted", "wait for it, or raise --lock-timeout")
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_exclusive(handle: int, timeout: float) -> bool:
    """Turn a shared descriptor into the only one. False when others stay for longer than `timeout` seconds."""
    return _wait(handle, fcntl.LOCK_EX, timeout)


def make_shared(handle: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_SH)


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
            raise StoreIOError(f"locking the store failed: {error}", "use a local disk") from error


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorePermission(f"cannot open {path}: {error.strerror}", "use a store of your own") from error


def _command() -> str:
    return shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:2]])[:80] if sys.argv else "python"


def _forget_after_fork() -> None:
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
