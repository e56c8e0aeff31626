"""The files of an archive: a folder of flat files, or a tar of the same. No name, type or size of one is trusted."""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cacheblend_store.errors import ArchiveError

MANIFEST, SIGNATURE, SUFFIX = "manifest.jsonl", "manifest.hmac", ".safetensors"
DAMAGED = "the archive is damaged or was cut off: get it again"
_NAME = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(SIGNATURE)}|[0-9a-f]{{40}}{re.escape(SUFFIX)}")
_FOREIGN = "it was not made by cacheblend chunks export"
Add = Callable[[str, bytes], object]
"""Adds a file: its name and what is in it."""


@dataclass(frozen=True)
class ArchiveLimits:
    """The most that is taken in: files, and bytes of all of them."""

    entries: int = 100_000
    bytes: int = 100 << 30


@dataclass(frozen=True)
class ArchiveOptions:
    """What an archive is written or read with. sign_key: a secret, for a signature over the manifest. salt: what the chunks
    are stored with; it is not written. rename: from a source in the store to what the archive calls it, or back."""

    sign_key: bytes | None = None
    salt: str = ""
    rename: Callable[[str], str] = str
    limits: ArchiveLimits = ArchiveLimits()


NO_OPTIONS = ArchiveOptions()


@dataclass
class ArchiveFiles:
    """sizes: bytes of each file by name, every name one that an export has. open: a file, to be read from its beginning."""

    open: Callable[[str], IO[bytes]]
    limits: ArchiveLimits
    sizes: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def admit(self, name: str, size: int) -> None:
        """Raises ArchiveError for a name that no export has, one that is there, and more than the limits."""
        if not _NAME.fullmatch(name):
            raise ArchiveError(f"the archive holds a file that no export has: {name[:80]!r}", _FOREIGN)
        if name in self.sizes:
            raise ArchiveError(f"the archive holds {name} twice", _FOREIGN)
        self.sizes[name] = size
        self.total += size
        if len(self.sizes) > self.limits.entries:
            raise ArchiveError(f"the archive holds more than {self.limits.entries:,} files", "raise --max-entries")
        if self.total > self.limits.bytes:
            raise ArchiveError(f"the archive holds more than {self.limits.bytes:,} bytes", "raise --max-bytes")

    def read(self, name: str) -> bytes:
        """All of a file. Raises ArchiveError when it is not as long as it was said to be."""
        with self.open(name) as file:
            data = file.read(self.sizes[name])
        if len(data) != self.sizes[name]:
            raise ArchiveError(f"{name} ends before it should", DAMAGED)
        return data


@contextmanager
def open_archive(path: Path, limits: ArchiveLimits) -> Iterator[ArchiveFiles]:
    """Raises FileNotFoundError, and ArchiveError for what is no export or over the limits."""
    kind = path.stat().st_mode
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise ArchiveError(f"{path} is neither a file nor a folder", "name a folder or a .tar")
    try:
        with _folder(path, limits) if stat.S_ISDIR(kind) else _tar(path, limits) as files:
            yield files
    except tarfile.TarError as error:
        raise ArchiveError(f"{path} does not read as a tar: {error}", DAMAGED) from error


@contextmanager
def _folder(path: Path, limits: ArchiveLimits) -> Iterator[ArchiveFiles]:
    def opener(name: str, flags: int) -> int:  # a link or pipe may have taken the place of a file since it was listed
        return os.open(path / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_file(name: str) -> IO[bytes]:
        try:
            return open(name, "rb", opener=opener)
        except OSError as error:
            raise ArchiveError(f"cannot read {name}: {error.strerror}", "check the archive's files") from error

    files = ArchiveFiles(open_file, limits)
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise ArchiveError(f"{entry.name[:80]!r} in {path} is no plain file", _FOREIGN)
            files.admit(entry.name, entry.stat(follow_symlinks=False).st_size)
    yield files


class _PlainFile(tarfile.TarInfo):
    """Of a tar's headers only those of plain files are taken: links, devices, folders and extended headers, which can
    claim any size, are refused before tarfile acts on them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainFile:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ArchiveError(f"the tar holds an entry that is no plain file: {info.name[:80]!r}", _FOREIGN)
        return info


@contextmanager
def _tar(path: Path, limits: ArchiveLimits) -> Iterator[ArchiveFiles]:
    def open_member(name: str) -> IO[bytes]:
        file = tar.extractfile(members[name])
        assert file is not None
        return file

    files, members = ArchiveFiles(open_member, limits), dict[str, tarfile.TarInfo]()
    with tarfile.open(path, "r:", tarinfo=_PlainFile) as tar:
        for member in tar:
            files.admit(member.name, member.size)
            members[member.name] = member
        yield files


@contextmanager
def create_archive(path: Path, *, force: bool) -> Iterator[Add]:
    """A tar when the name ends in .tar, else a folder, for its owner alone, as KV is as private as the text it came from.
    It appears whole at the end, or not at all.

    force: an export that is there is replaced. Raises ArchiveError when something else is in the way.
    """
    is_tar = path.name.endswith(".tar")
    _check_way(path, is_tar=is_tar, force=force)
    beside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        if is_tar:
            with (
                open(beside, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as stream,
                tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar,
            ):
                yield lambda name, data: tar.addfile(_header(name, data), io.BytesIO(data))
        else:
            beside.mkdir(mode=0o700)
            yield lambda name, data: (beside / name).write_bytes(data)
            if path.exists():
                _check_way(path, is_tar=is_tar, force=force)  # it may have got other files since
                shutil.rmtree(path)
        beside.replace(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(FileNotFoundError):
            beside.unlink()


def _header(name: str, data: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    return info


def _check_way(path: Path, *, is_tar: bool, force: bool) -> None:
    """Raises ArchiveError unless there is nothing, or an export of the same kind that may be replaced: with no other files
    than an export has, and a manifest that begins as theirs do."""
    if not os.path.lexists(path):
        return
    if not force:
        raise ArchiveError(f"{path} is there already", "name another path, or give --force to replace it")
    replaceable = is_tar != path.is_dir()
    if replaceable and not is_tar:
        try:
            with open_archive(path, ArchiveLimits(1 << 60, 1 << 60)) as files, files.open(MANIFEST) as file:
                replaceable = b'"cacheblend-export"' in file.readline(4096)
        except ArchiveError:
            replaceable = False
    if not replaceable:
        raise ArchiveError(f"{path} is no export of this kind: it is not replaced", "name another path")
