"""Opening the LMDB environment: one place, with every check that comes before the first read."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from cacheblend_store.errors import (
    StoreCorrupt,
    StoreFormat,
    StoreIOError,
    StoreLocked,
    StoreNoSpace,
    StoreNotFound,
    StorePermission,
)

DATABASES = ("meta", "chunks", "blobs", "documents", "refs", "lru")
MAX_READERS = 2048
MAP_SIZE = 1 << 40  # sparse: address space, not disk
_MDB_MAGIC = 0xBEEFC0DE
_MIN_FREE_BYTES = 64 << 20
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
    "beegfs",
}

_opened: dict[tuple[int, str], tuple[lmdb.Environment, int]] = {}
_opened_lock = threading.Lock()


def open_environment(path: Path, *, write: bool, create: bool, force: bool) -> lmdb.Environment:
    """The environment of the store at `path`; a second open in one process shares it, a forked child opens its own.

    Raises StoreNotFound, StoreFormat, StoreCorrupt, StorePermission, StoreNoSpace or StoreIOError.
    """
    key = (os.getpid(), str(path.resolve()))
    with _opened_lock:
        check_path(path, write=write, create=create, force=force)
        if key in _opened:  # LMDB allows one environment a file and process: readers and writers share it
            environment, count = _opened[key]
            _opened[key] = (environment, count + 1)
            return environment
        for other in [k for k in _opened if k[0] != os.getpid() and k[1] == key[1]]:
            _opened.pop(other)[0].close()  # inherited by a fork: py-lmdb forgets it and leaves the parent's locks alone
        readonly = not os.access(path / "data.mdb" if (path / "data.mdb").exists() else path, os.W_OK)
        try:
            environment = lmdb.open(
                str(path),
                map_size=max(MAP_SIZE, _file_size(path)),
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                readonly=readonly,
                create=not readonly and create,
                mode=0o600,
                sync=True,
                metasync=True,
                writemap=False,
                readahead=True,
                lock=os.access(path, os.W_OK),
                lib_version=0,
            )
        except lmdb.InvalidError as error:
            raise StoreFormat(
                f"{path} is not an LMDB file this build reads: {error}", "name another --store"
            ) from error
        except lmdb.CorruptedError as error:
            raise StoreCorrupt(f"the store at {path} is damaged: {error}", _restore_hint(path)) from error
        except (lmdb.Error, OSError) as error:
            raise StoreIOError(f"cannot open the store at {path}: {error}", "check the disk and permissions") from error
        if not readonly:
            environment.reader_check()
        _opened[key] = (environment, 1)
        return environment


def close_environment(environment: lmdb.Environment) -> None:
    """Give one open back; the last one closes."""
    with _opened_lock:
        for key, (held, count) in list(_opened.items()):
            if held is environment:
                if count > 1:
                    _opened[key] = (held, count - 1)
                else:
                    del _opened[key]
                    if key[0] == os.getpid():
                        environment.close()


def check_path(path: Path, *, write: bool, create: bool, force: bool) -> None:
    """Everything that must hold before LMDB touches the file; creates the directory (0700) when asked to."""
    data = path / "data.mdb"
    if path.exists() and not path.is_dir():
        raise StoreFormat(f"{path} is a file, and a store is a directory", "name another --store")
    if not data.exists():
        others = [p.name for p in path.iterdir() if p.name not in ("lock.mdb", "writer.lock")] if path.is_dir() else []
        if path.is_dir() and (path / "lock.mdb").exists() and not create:
            raise StoreCorrupt(f"the store at {path} has lost its data.mdb", _restore_hint(path))
        if not (write and create):
            raise StoreNotFound(f"there is no store at {path}", "make one: cacheblend precompute docs/")
        if others:
            raise StoreFormat(f"{path} holds other files ({others[0]}) and no store", "name an empty or new directory")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorePermission(f"cannot create the store at {path}: {error}", "name another --store") from error
    else:
        check_file(data)
    info = path.stat()
    if write and not force:
        if info.st_mode & stat.S_IWOTH:
            raise StorePermission(f"the store at {path} is writable by everyone", f"run: chmod 700 {path}")
        if info.st_uid != os.geteuid():
            raise StorePermission(f"the store at {path} belongs to another user", "use a store of your own")
    kind = filesystem_type(path)
    if kind in _NETWORK and not force:
        raise StoreFormat(
            f"{path} is on a network filesystem ({kind}), where LMDB's locks do not hold", "use a local disk"
        )
    if write and not os.access(path, os.W_OK):
        raise StorePermission(f"the store at {path} is read-only for this user", "use a store of your own")


def check_file(data: Path) -> None:
    """data.mdb is an LMDB file and as long as its newest meta page says; else a read would end in SIGBUS."""
    size = data.stat().st_size
    with data.open("rb") as stream:
        head = stream.read(4096 * 17)
    if size == 0:
        raise StoreCorrupt(f"{data} is empty: it was truncated", _restore_hint(data.parent))
    meta = _meta(head, 0)
    if meta is None:
        if size < 8192:
            raise StoreCorrupt(f"{data} is truncated to {size} bytes", _restore_hint(data.parent))
        raise StoreFormat(f"{data} is not an LMDB file", "name another --store")
    page_size = meta[2]
    second = _meta(head, page_size)
    if second is None or page_size not in (4096, 8192, 16384, 32768, 65536):
        raise StoreCorrupt(f"a meta page of {data} is damaged", _restore_hint(data.parent))
    newest = max(meta, second)
    if newest[1] and (newest[1] + 1) * page_size > size:
        raise StoreCorrupt(
            f"{data} has {size} bytes, and its index names {(newest[1] + 1) * page_size}: it was truncated",
            _restore_hint(data.parent),
        )


def _meta(head: bytes, offset: int) -> tuple[int, int, int] | None:
    """(transaction id, last page number, page size) of a meta page, None when it is none (LMDB 0.9 layout, 64 bit)."""
    page = head[offset + 16 : offset + 16 + 152]
    if len(page) < 136:
        return None
    magic, version = struct.unpack_from("<II", page, 0)
    if magic != _MDB_MAGIC or version != 1:
        return None
    (page_size,) = struct.unpack_from("<I", page, 24)  # md_pad of the free DB holds the page size
    last_page, transaction = struct.unpack_from("<QQ", page, 24 + 2 * 48)
    return transaction, last_page, page_size


def filesystem_type(path: Path) -> str:
    """The type of the filesystem `path` is on, "" where the system does not say."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in mounts:
        _, mount, fstype, *_ = line.split(" ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


def check_space(path: Path, num_bytes: int) -> None:
    """Raises StoreNoSpace when the disk has no room for num_bytes and a margin."""
    free = shutil.disk_usage(path).free
    needed = num_bytes + num_bytes // 4 + _MIN_FREE_BYTES
    if free < needed:
        raise StoreNoSpace(
            f"the disk of {path} has {free >> 20} MiB free, and {needed >> 20} MiB are needed",
            "free some space, remove chunks (cacheblend chunks rm), or name another --store",
        )


@contextmanager
def writer_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold the store's writer lock, which names its holder. Raises StoreLocked after `timeout` seconds."""
    handle = os.open(path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
                    raise StoreLocked(
                        f"the store at {path} is being written by {holder}",
                        "wait for it, or raise --lock-timeout",
                    ) from None
                time.sleep(0.005)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(handle)  # drops the lock


def _file_size(path: Path) -> int:
    data = path / "data.mdb"
    return data.stat().st_size if data.exists() else 0


def _restore_hint(path: Path) -> str:
    return f"the KV can be computed again: move {path} away and run cacheblend precompute"
