"""What must hold of the store's directory, file and disk before LMDB touches them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cacheblend_store.errors import (
    StoreCorrupt,
    StoreFormat,
    StoreIOError,
    StoreNoSpace,
    StoreNotFound,
    StorePermission,
)
from cacheblend_store.lmdb_file.pages import NO_PAGE, PAGE_SIZES, Meta, PageReader, parse_meta

DATA, LOCK = "data.mdb", "lock.mdb"
DATABASES = ("meta", "chunks", "blobs", "documents", "refs", "lru")
OWN_FILES = ("writer.lock", "open.lock", "making.tmp", "search.sqlite3", "search.sqlite3-journal")
_MIN_FREE_BYTES = 64 << 20
_TREE_BYTES = 1 << 20  # more than the pages of its trees that a commit writes anew
_LOOKS = 32  # at a file that others write to
_TAILS_KEPT = 64
_free_tails = set[tuple[int, int, int, int]]()
"""Files that end before free pages: device, inode, commit and length."""
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "beegfs", "ncpfs",
    "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "gfs2", "ocfs2", "gpfs", "orangefs",
}  # fmt: skip


def check_path(path: Path, *, write: bool, create: bool, force: bool) -> None:
    """Refuse what is no store, is damaged, or is not ours to write. Makes the directory (0700) when asked to."""
    try:
        _check_path(path, write=write, create=create, force=force)
    except PermissionError as error:
        raise _unreadable(path, error) from error


def _check_path(path: Path, *, write: bool, create: bool, force: bool) -> None:
    if path.exists() and not path.is_dir():
        raise StoreFormat(f"{path} is a file, and a store is a directory", "name another --store")
    there = _exists(path / DATA)
    if not there:
        _check_absent(path, create=write and create)
        with system_errors(path):
            try:
                _make_folder(path)
            except (PermissionError, FileExistsError, NotADirectoryError) as error:
                raise StorePermission(f"cannot create the store at {path}: {error}", "name another --store") from error
    if write and not force:
        for part, mode in ((path, "700"), (path / DATA, "600")) if there else ((path, "700"),):
            info = part.stat()
            if info.st_mode & stat.S_IWOTH:
                raise StorePermission(f"the store at {path} is writable by everyone", f"run: chmod {mode} {part}")
            if info.st_uid != os.geteuid():
                raise StorePermission(f"the store at {path} belongs to another user", "use a store of your own")
    kind = filesystem_type(path)
    if kind in _NETWORK and not force:
        raise StoreFormat(
            f"{path} is on a network filesystem ({kind}), where LMDB's locks do not hold",
            "use a local disk; or, where no other machine opens it, set CACHEBLEND_FORCE_STORE=1",
        )
    if write and not os.access(path, os.W_OK):
        raise StorePermission(f"the store at {path} is read-only for this user", "use a store of your own")
    if there:
        check_file(path / DATA)


def check_file(data: Path) -> Meta:
    """data.mdb is an LMDB file, whole as far as its newest meta page says, and its list of databases reads.

    Returns the newest meta page. Raises StoreCorrupt, StoreFormat or StorePermission.
    """
    try:
        handle = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(data, error) from error
    try:
        for attempt in range(_LOOKS):  # commits of others between two reads look like damage, or like other data
            before = _moment(handle)
            try:
                return _check_pages(handle, data)
            except (StoreCorrupt, StoreFormat):
                if attempt == _LOOKS - 1 or (attempt and before == _moment(handle)):
                    raise
        raise AssertionError("unreachable")
    finally:
        os.close(handle)


def _moment(handle: int) -> tuple[bytes, bytes, int]:
    """What every commit changes."""
    return os.pread(handle, 4096, 0), os.pread(handle, 4096, os.sysconf("SC_PAGE_SIZE")), os.fstat(handle).st_size


def read_meta(handle: int, data: Path) -> Meta:
    """The newest of the two meta pages, both checked against each other and against the size of the file."""
    return max(read_metas(handle, data), key=lambda meta: meta.txnid)


def read_metas(handle: int, data: Path) -> tuple[Meta, Meta]:
    """Both meta pages, checked as by `read_meta`."""
    size = os.fstat(handle).st_size
    if size == 0:
        raise StoreCorrupt(f"{data} is empty: it was truncated", restore_hint(data.parent))
    first = parse_meta(os.pread(handle, 4096, 0))
    if first is None:
        if size < 8192:
            raise StoreCorrupt(f"{data} is truncated to {size} bytes", restore_hint(data.parent))
        if parse_meta(os.pread(handle, 4096, 4096)) is not None:
            raise StoreCorrupt(f"the first meta page of {data} is damaged", restore_hint(data.parent))
        raise StoreFormat(f"{data} is not an LMDB file", "name another --store")
    if first.page_size not in PAGE_SIZES:
        raise StoreCorrupt(f"a meta page of {data} is damaged", restore_hint(data.parent))
    second = parse_meta(os.pread(handle, 4096, first.page_size))
    if second is None:
        if size < 2 * first.page_size:
            raise StoreCorrupt(f"{data} is truncated to {size} bytes", restore_hint(data.parent))
        raise StoreCorrupt(f"the second meta page of {data} is damaged", restore_hint(data.parent))
    fresh = first.txnid in (0, 1) and second.txnid in (0, 1)
    in_turn = abs(first.txnid - second.txnid) == 1 and first.txnid % 2 == 0
    if second.page_size != first.page_size or not (fresh or in_turn):
        raise StoreCorrupt(f"the two meta pages of {data} do not belong together", restore_hint(data.parent))
    newest = first if first.txnid > second.txnid else second
    if newest.next_pgno > 2 and newest.next_pgno * newest.page_size > size and not _is_free(handle, data, newest, size):
        raise StoreCorrupt(
            f"{data} has {size} bytes, and its index names {newest.next_pgno * newest.page_size}: it was truncated",
            restore_hint(data.parent),
        )
    return first, second


def _is_free(handle: int, data: Path, meta: Meta, size: int) -> bool:
    """Whether all that lies behind the end of the file are free pages. A commit does not write the pages that it took at the
    end of the file and gave back itself; nothing reads them, and who takes one again writes it."""
    info = os.fstat(handle)
    what = (info.st_dev, info.st_ino, meta.txnid, size)
    if what in _free_tails:
        return True
    end, free = size // meta.page_size, set[int]()
    try:
        for pages in PageReader(handle, meta, str(data.parent)).free_pages():
            free.update(page for page in pages if page >= end)
    except StoreCorrupt:
        return False
    if not all(page in free for page in range(end, meta.next_pgno)):  # ends at the first that is not
        return False
    while len(_free_tails) >= _TAILS_KEPT:
        _free_tails.pop()
    _free_tails.add(what)
    return True


def _check_older(pages: PageReader, newest: int) -> None:
    """The older meta page is not the newest one with a damaged number: nothing else of it matters, it is not used.

    A meta page that cannot be written is left by LMDB with the roots of the commit that failed and the number of the one
    before last: pages behind its end, or a number that no single bit tells from the failed commit's, give it away.
    """
    try:
        freed = pages.last_freed()
    except StoreCorrupt:
        return
    older = pages.meta.txnid
    failed = freed == newest + 1 and older == newest - 1 and ((newest + 1) ^ older).bit_count() > 1
    if not failed:
        pages.check_age()


def _check_pages(handle: int, data: Path) -> Meta:
    older, meta = sorted(read_metas(handle, data), key=lambda meta: meta.txnid)
    _check_older(PageReader(handle, older, str(data.parent)), meta.txnid)
    pages = PageReader(handle, meta, str(data.parent))
    pages.check_age()
    if meta.main.root != NO_PAGE:
        names = [node.key for node in pages.nodes(meta.main)]
        if not any(name.encode() in names for name in DATABASES):
            raise no_store(data.parent)
        for name in names:
            pages.tree(name)
    return meta


def _exists(data: Path) -> bool:
    try:
        data.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _unreadable(path: Path, error: OSError) -> StorePermission:
    return StorePermission(f"cannot read {path}: {error.strerror}", "use a store of your own")


def _check_absent(path: Path, *, create: bool) -> None:
    """There is no data.mdb: may one be made here?"""
    there = {p.name for p in path.iterdir()} if path.is_dir() else set()
    if LOCK in there:  # LMDB made it when it opened a data.mdb
        raise StoreCorrupt(f"the store at {path} has lost its data.mdb", again_hint(path))
    if not create:
        raise StoreNotFound(f"there is no store at {path}", "make one: cacheblend precompute docs/")
    others = sorted(there - set(OWN_FILES))
    if others:
        raise StoreFormat(f"{path} holds other files ({others[0]}) and no store", "name an empty or new directory")


def _make_folder(path: Path, mode: int = 0o700) -> None:
    """Make the directory and those above it, durably: a store that is there after a power cut needs its path, too."""
    if not path.parent.is_dir():
        _make_folder(path.parent, 0o777)
    path.mkdir(mode=mode, exist_ok=True)
    with suppress(PermissionError):  # a directory above that may be entered and not read
        sync_file(path.parent)


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """The system's errors in the store at `path` as ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(path) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorePermission(f"cannot write {path}: {error.strerror}", "use a store of your own") from error
        raise bad_disk(path, error) from error


def full_disk(path: Path) -> StoreNoSpace:
    return StoreNoSpace(
        f"the disk of {path} is full: nothing of this write was kept",
        "free some space, remove chunks (cacheblend chunks prune), or name another --store",
    )


def bad_disk(path: Path, error: Exception) -> StoreIOError:
    return StoreIOError(
        f"reading or writing the store at {path} failed: {error}", "check the disk (dmesg names bad sectors)"
    )


def sync_file(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the filesystem `path` is on, "" where the system does not say."""
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


def check_space(path: Path, num_bytes: int, reusable: Callable[[], int] = lambda: 0) -> bool:
    """Raises StoreNoSpace when the disk has no room for num_bytes more and a margin.

    reusable: bytes of the file that are free to be written; asked when the disk alone does not do. Returns whether it does.
    """
    free, wanted = shutil.disk_usage(path).free, num_bytes + num_bytes // 4
    if free >= wanted + _MIN_FREE_BYTES:
        return True
    beyond = wanted + _TREE_BYTES - reusable()
    needed = beyond + _MIN_FREE_BYTES
    if beyond > 0 and free < needed:
        raise StoreNoSpace(
            f"the disk of {path} has {free >> 20} MiB free, and {needed >> 20} MiB are needed",
            "free some space, remove chunks (cacheblend chunks prune), or name another --store",
        )
    return False


def no_store(path: Path) -> StoreFormat:
    return StoreFormat(f"{path} is an LMDB file, and no cacheblend store", "name another --store")


def restore_hint(path: Path) -> str:
    return f"rescue what reads: cacheblend chunks verify --repair; or {again_hint(path)}"


def again_hint(path: Path) -> str:
    return f"compute the KV again: move {path} away and run cacheblend precompute"
