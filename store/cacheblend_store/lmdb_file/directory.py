"""Check the store's directory and disk before LMDB uses them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from cacheblend_store.errors import StoreCorrupt, StoreError, StoreFormat, StoreNoSpace, StoreNotFound, StorePermission
from cacheblend_store.lmdb_file.translation import again_hint, bad_disk, system_errors
from cacheblend_store.private_files import InsecurePath, exposed, open_file

DATA, LOCK, MAKING, RESERVE = "data.mdb", "lock.mdb", "making.tmp", "reserve.tmp"
OWN_FILES = ("writer.lock", "open.lock", "collect.lock", MAKING, RESERVE, "search.sqlite3", "search.sqlite3-journal")
_SERVER_FILES = re.compile(r"engine-[0-9a-f]+\.(lock|log|sock(\.\d+)?)")
"""Log and socket of a server. They are created before it opens the store."""
MIN_FREE_BYTES = 64 << 20
_RESERVE_BYTES = 2 << 20
TREE_BYTES = 1 << 20  # upper bound for tree pages that a commit rewrites
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "beegfs", "ncpfs",
    "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "gfs2", "ocfs2", "gpfs", "orangefs",
}  # fmt: skip


def check_directory(path: Path, *, write: bool, create: bool, force: bool) -> None:
    """Refuse a directory that is not a store, or not private. create: create it (0700) if missing."""
    try:
        there = _is_there(path, create=write and create)
        if write:
            _check_private(path, there=there, force=force)
    except PermissionError as error:
        raise unreadable(path, error) from error
    except OSError as error:
        raise bad_disk(path, error) from error
    kind = filesystem_type(path)
    if kind in _NETWORK and not force:
        raise StoreFormat(
            f"{path} is on a network filesystem ({kind}), where LMDB's locks do not hold",
            "use a local disk; or, where no other machine opens it, set CACHEBLEND_FORCE_STORE=1",
        )


def _is_there(path: Path, *, create: bool) -> bool:
    """Return whether data.mdb exists; if not, check that it may be created."""
    if path.exists() and not path.is_dir():
        raise StoreFormat(f"{path} is a file; a store is a directory", "name another --store")
    if os.path.lexists(path / DATA):
        return True
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if LOCK in names:  # LMDB creates it when it opens a data.mdb
        raise lost(path)
    if not create:
        raise StoreNotFound(f"there is no store at {path}", "store documents first: cacheblend precompute FOLDER")
    others = sorted(name for name in names - set(OWN_FILES) if not _SERVER_FILES.fullmatch(name))
    if others:
        raise StoreFormat(
            f"{path} holds other files ({others[0]}) and is not a store", "name an empty or new directory"
        )
    with system_errors(path):
        try:
            _make_directory(path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            reason = f"{error.filename} is not a directory" if isinstance(error, FileExistsError) else error.strerror
            raise StorePermission(f"cannot create the store at {path}: {reason}", "name another --store") from error
    return False


def is_writable(path: Path, *, force: bool) -> bool:
    """Return whether this user may write an existing store: it is this user's and private, or force."""
    try:
        _check_private(path, there=True, force=force)
    except (StorePermission, OSError):
        return False
    return os.access(path / DATA, os.W_OK)


def _check_private(path: Path, *, there: bool, force: bool) -> None:
    """Check that no other user can write the store or exchange its directory."""
    if not force:
        error = exposed(path)
        if error is not None and Path(error.filename) != path:
            raise StorePermission(
                f"{error.filename}, above the store at {path}, is writable by every user: they could exchange the store",
                f"run: chmod o-w {error.filename}; or, if only you use this machine, set CACHEBLEND_FORCE_STORE=1",
            )
        info = (path / DATA).lstat() if there else path.stat()
        if info.st_uid != os.geteuid() or (error is not None and path.stat().st_uid != os.geteuid()):
            raise StorePermission(f"the store at {path} belongs to another user", "use a store of your own")
        if error is not None or (info.st_mode & 0o022 and not stat.S_ISLNK(info.st_mode)):
            part, mode = (path, "700") if error is not None else (path / DATA, "600")
            raise StorePermission(f"the store at {path} is writable by other users", f"run: chmod {mode} {part}")
    if not os.access(path, os.W_OK):
        raise StorePermission(f"the store at {path} is read-only for this user", "use a store of your own")


def _make_directory(path: Path, mode: int = 0o700) -> None:
    """Create the directory and its parents durably, so that the path of a store survives a power cut."""
    if not path.parent.is_dir():
        _make_directory(path.parent, 0o755)
    path.mkdir(mode=mode, exist_ok=True)
    with suppress(PermissionError):  # the parent directory may be enterable but not readable
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    sync_handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def sync_handle(handle: int) -> None:
    """Sync a file to the disk and close it."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_data(store: Path) -> int:
    """Return a descriptor of data.mdb, to read it. Raises StorePermission, StoreCorrupt."""
    try:
        return open_file(store / DATA, anywhere=True)
    except OSError as error:
        raise unreadable(store / DATA, error) from error


def unreadable(path: Path, error: OSError) -> StoreError:
    if path.name == DATA and isinstance(error, FileNotFoundError):
        return lost(path.parent)
    if isinstance(error, InsecurePath):
        return StorePermission(f"{error.filename} {error.strerror}", "remove it, or name another --store")
    return StorePermission(f"cannot read {path}: {error.strerror}", "use a store of your own")


def lost(path: Path) -> StoreCorrupt:
    return StoreCorrupt(f"the store at {path} has lost its data.mdb", again_hint(path))


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the filesystem that `path` is on, "" if unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split(" ")[0]
    return kind


def check_space(path: Path, num_bytes: int, reusable: int = 0) -> None:
    """Raise StoreNoSpace if the disk has no space for num_bytes and a margin. reusable: free bytes within the file."""
    beyond = num_bytes + num_bytes // 4 - max(0, reusable - TREE_BYTES)
    free, needed = shutil.disk_usage(path).free, beyond + MIN_FREE_BYTES
    if beyond > 0 and free < needed:
        raise StoreNoSpace(
            f"the disk of {path} has {free >> 20} MiB free; {needed >> 20} MiB are needed",
            "free some space, remove chunks (cacheblend chunks prune), or name another --store",
        )


def keep_reserve(store: Path) -> None:
    """Create a file that keeps disk space for deletions, if it is missing and the disk has room: on a full disk, LMDB
    cannot delete without new pages."""
    path = store / RESERVE
    with suppress(OSError):
        if not os.path.lexists(path) and shutil.disk_usage(store).free > MIN_FREE_BYTES + _RESERVE_BYTES:
            handle = open_file(path, os.O_RDWR | os.O_CREAT, anywhere=True)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, _RESERVE_BYTES)
                else:
                    os.write(handle, bytes(_RESERVE_BYTES))
            finally:
                os.close(handle)


def use_reserve(store: Path) -> bool:
    """Give the space of the reserve back to the disk. Return whether there was any."""
    with suppress(OSError):
        os.unlink(store / RESERVE)
        return True
    return False
