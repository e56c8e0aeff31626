"""Where an export is written: a folder of flat files, or a tar of the same."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cacheblend_store.archive.input import MANIFEST, TAR_BLOCK, ArchiveLimits, is_tar, open_archive
from cacheblend_store.archive.records import decode_line, first_line
from cacheblend_store.errors import ArchiveError

Parts = Iterable[bytes | memoryview]


def create_archive(path: Path, *, force: bool) -> ArchiveOutput:
    """A tar when the name says so, else a folder. Raises ArchiveError when there is something in the way.

    force: an export that is there is replaced. A folder is one when all that is in it is an export's.
    """
    if os.path.lexists(path):
        if not force:
            raise ArchiveError(f"{path} is there already", "name another path, or give --force to replace it")
        if path.is_dir():
            _require_export(path)
        if not path.is_dir() and not is_tar(path):
            raise ArchiveError(f"{path} is a file: it is not replaced by a folder", "name another path, or a .tar")
    return _Tar(path) if is_tar(path) else _Folder(path)


class ArchiveOutput(ABC):
    """Files go to a place beside `path` until `finish` renames the whole. Left unfinished, they are removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f"{path.name}.partial-{os.getpid()}")

    def __enter__(self) -> ArchiveOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._abandon()

    @abstractmethod
    def add(self, name: str, size: int, parts: Parts) -> None:
        """A file of `size` bytes in all."""

    @abstractmethod
    def finish(self) -> None:
        """Put the whole in place."""

    @abstractmethod
    def _abandon(self) -> None: ...


class _Folder(ArchiveOutput):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._beside.mkdir(mode=0o700)

    def add(self, name: str, size: int, parts: Parts) -> None:
        with open(self._beside / name, "xb", opener=_private) as stream:
            for part in parts:
                stream.write(part)
            assert stream.tell() == size

    def finish(self) -> None:
        if self._path.exists():
            _require_export(self._path)  # it may have got other files since
            shutil.rmtree(self._path)
        self._beside.rename(self._path)

    def _abandon(self) -> None:
        shutil.rmtree(self._beside, ignore_errors=True)


class _Tar(ArchiveOutput):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stream = open(self._beside, "xb", opener=_private)  # noqa: SIM115, closed by finish or _abandon

    def add(self, name: str, size: int, parts: Parts) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        self._stream.write(info.tobuf(tarfile.GNU_FORMAT))
        start = self._stream.tell()
        for part in parts:
            self._stream.write(part)
        assert self._stream.tell() - start == size
        self._stream.write(b"\0" * (-size % TAR_BLOCK))

    def finish(self) -> None:
        self._stream.write(b"\0" * (2 * TAR_BLOCK))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._beside, self._path)

    def _abandon(self) -> None:
        with suppress(OSError):  # what is still in its buffer may not fit the disk
            self._stream.close()
        with suppress(FileNotFoundError):
            self._beside.unlink()


def _require_export(folder: Path) -> None:
    """Raises ArchiveError unless every file has a name that an export's have, and the manifest begins as theirs do."""
    try:
        with open_archive(folder, ArchiveLimits(sys.maxsize, sys.maxsize)) as archive, archive.open(MANIFEST) as file:
            first = decode_line(file.read(4096).split(b"\n", 1)[0], 1)
        is_export = not is_tar(folder) and first.get("type") == first_line()["type"]
    except (ArchiveError, KeyError):
        is_export = False
    if not is_export:
        raise ArchiveError(f"{folder} is a folder and no export: it is not replaced", "name another path")


def _private(path: str, flags: int) -> int:
    """KV is as private as the text it came from."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
