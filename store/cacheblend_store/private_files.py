"""Open files in this user's own directories: store, caches, logs, sockets.

A file is opened relative to a descriptor of its directory, which must belong to this user and be writable by nobody
else. The file itself must be a regular file of this user: symbolic links, FIFOs and devices are refused, without
following them or waiting for them. A cloned repository or another user can therefore not make us write elsewhere.
Imports nothing of the store, so that commands that use a running engine start fast.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class InsecurePath(PermissionError):
    """A link, a special file, or a path that other users control. strerror: which of these; filename: the path."""

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))


def open_folder(path: Path) -> int:
    """Return a descriptor of a directory that belongs to this user and that only this user may write.

    The path may lead through symbolic links. Raises InsecurePath, OSError.
    """
    handle = os.open(os.path.realpath(path), _FOLDER_FLAGS)
    try:
        info = os.fstat(handle)
        if info.st_uid != os.geteuid():
            raise InsecurePath("belongs to another user", path)
        if info.st_mode & _OTHERS:
            raise InsecurePath("is writable by other users", path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_folder(path: Path) -> None:
    """Create a directory and its missing parents with mode 0700. If it exists and belongs to this user, take write
    permission from others, which it may have from an earlier version. Raises InsecurePath, OSError."""
    for missing in [folder for folder in (*reversed(path.parents), path) if not folder.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    info = path.stat()
    if info.st_uid == os.geteuid() and info.st_mode & _OTHERS:
        path.chmod(stat.S_IMODE(info.st_mode) & ~_OTHERS)
    os.close(open_folder(path))


def open_file(path: Path, flags: int = os.O_RDONLY, *, anywhere: bool = False) -> int:
    """Return a descriptor of a regular file of this user in a directory of this user. Raises InsecurePath, OSError.

    flags: as of os.open. A new file has mode 0600. With O_TRUNC the file is emptied after it was checked. anywhere:
    accept any directory, and a file of root or of the directory's owner.
    """
    folder = os.open(os.path.realpath(path.parent), _FOLDER_FLAGS) if anywhere else open_folder(path.parent)
    try:
        owners = {os.geteuid(), *((0, os.fstat(folder).st_uid) if anywhere else ())}
        handle = _open(path, folder, flags & ~os.O_TRUNC, owners)
    finally:
        os.close(folder)
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def _open(path: Path, folder: int, flags: int, owners: set[int]) -> int:
    try:
        handle = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InsecurePath("is a symbolic link", path) from error
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise InsecurePath("is not a regular file", path) from error
        error.filename = os.fspath(path)
        raise
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise InsecurePath("is not a regular file", path)
        if info.st_uid not in owners:
            raise InsecurePath("belongs to another user", path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_files(*paths: Path) -> None:
    """Check files that a library opens by name, like `open_file` anywhere. Missing ones are fine. Raises InsecurePath,
    OSError. In a directory of this user alone, nobody else can exchange them afterwards."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.close(open_file(path, anywhere=True))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of this user. Raises InsecurePath, OSError (EFBIG if it is larger)."""
    return _read(open_file(path), path, max_bytes)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file anywhere, also through links: a file that the user names, or of a cache
    that consists of links. Raises InsecurePath for a FIFO or device, OSError (EFBIG if it is larger)."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InsecurePath("is not a regular file", path)
    return _read(handle, path, max_bytes)


def _read(handle: int, path: Path, max_bytes: int) -> bytes:
    with os.fdopen(handle, "rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes:,} bytes", os.fspath(path))
    return data


def replace(path: Path, data: bytes) -> None:
    """Write a file of this user atomically: concurrent processes never see half of it. Raises InsecurePath, OSError."""
    temporary = temporary_of(path, data)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(path: Path, data: bytes = b"") -> Path:
    """Create a private file with a unique name next to `path`, and the directory. Raises InsecurePath, OSError."""
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        create(temporary, data)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def create(path: Path, data: bytes) -> None:
    """Write a new private file in a directory of this user. Raises FileExistsError, InsecurePath, OSError."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
        stream.write(data)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file of this user. Child processes do not inherit it. Raises InsecurePath, OSError."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT), "wb") as stream:
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def exposed(folder: Path) -> InsecurePath | None:
    """Return how other users could change a directory or exchange it, or None.

    It must be this user's and writable by nobody else. Directories above it, and above a link to it, may be writable
    by everyone only with the sticky bit. Raises OSError if it does not exist.
    """
    try:
        os.close(open_folder(folder))
    except InsecurePath as error:
        return error
    absolute = Path(os.path.abspath(folder))
    for parent in {*absolute.parents, *Path(os.path.realpath(folder)).parents}:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return InsecurePath("is writable by every user", parent)
    return None
