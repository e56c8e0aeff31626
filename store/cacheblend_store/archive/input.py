"""What an export is read from: a folder of flat files, or a tar of the same. No name, type or size is trusted.

Tars are read by hand, header by header: what an export never holds (links, devices, folders, extended headers) is
refused by its type, before anything of it is believed.
"""

from __future__ import annotations

import os
import re
import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cacheblend_store.errors import ArchiveError

MANIFEST, SIGNATURE, SUFFIX = "manifest.jsonl", "manifest.hmac", ".safetensors"
TAR_BLOCK = 512
_NAME = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(SIGNATURE)}|[0-9a-f]{{40}}{re.escape(SUFFIX)}")
_FOREIGN = "it was not made by cacheblend chunks export"
_TAR_TYPES = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"5": "a folder", b"6": "a pipe",
}  # fmt: skip


@dataclass(frozen=True)
class ArchiveLimits:
    """The most that is taken in: files, and bytes of all of them."""

    entries: int = 100_000
    bytes: int = 100 << 30


def is_tar(path: Path) -> bool:
    return path.name.endswith(".tar")


def open_archive(path: Path, limits: ArchiveLimits) -> ArchiveInput:
    """Raises FileNotFoundError, and ArchiveError for what is no export or over the limits."""
    info = path.stat()
    if stat.S_ISDIR(info.st_mode):
        return _Folder(path, limits)
    if not stat.S_ISREG(info.st_mode):
        raise ArchiveError(f"{path} is neither a file nor a folder", "name a folder or a .tar")
    return _Tar(path, limits)


class ArchiveInput(ABC):
    """sizes: bytes of each file by name. Every name is one that an export has."""

    def __init__(self, limits: ArchiveLimits) -> None:
        self.sizes: dict[str, int] = {}
        self._limits, self._total = limits, 0

    def __enter__(self) -> ArchiveInput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def open(self, name: str) -> ArchiveFile: ...

    def _admit(self, name: str, size: int) -> None:
        if not _NAME.fullmatch(name):
            outside = name.startswith("/") or ".." in name.split("/")
            what = "a path that leads out of it" if outside else "a file that no export has"
            raise ArchiveError(f"the archive holds {what}: {name[:80]!r}", _FOREIGN)
        if name in self.sizes:
            raise ArchiveError(f"the archive holds {name} twice", _FOREIGN)
        self.sizes[name] = size
        self._total += size
        if len(self.sizes) > self._limits.entries:
            raise ArchiveError(f"the archive holds more than {self._limits.entries:,} files", "raise --max-entries")
        if self._total > self._limits.bytes:
            raise ArchiveError(f"the archive holds more than {self._limits.bytes:,} bytes", "raise --max-bytes")


class ArchiveFile:
    """One file of an archive, read from its beginning. owned: the descriptor is closed with it."""

    def __init__(self, handle: int, name: str, start: int, size: int, *, owned: bool) -> None:
        self._handle, self._name, self._at, self._end, self._owned = handle, name, start, start + size, owned

    def __enter__(self) -> ArchiveFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._owned:
            os.close(self._handle)

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer. Raises ArchiveError when the file is too short for it."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._handle, [buffer[done : done + self._end - self._at]], self._at)
            if count == 0:
                raise ArchiveError(f"{self._name} ends before it should", "the archive is damaged: get it again")
            done, self._at = done + count, self._at + count

    def skip(self, count: int) -> None:
        self._at = min(self._at + count, self._end)

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        size = min(size, self._end - self._at)
        buffer = bytearray(size)
        self.read_into(memoryview(buffer))
        return bytes(buffer)


class _Folder(ArchiveInput):
    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        super().__init__(limits)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        raise ArchiveError(f"{entry.name[:80]!r} in {path} is no plain file", _FOREIGN)
                    self._admit(entry.name, info.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._folder)

    def open(self, name: str) -> ArchiveFile:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(name, flags, dir_fd=self._folder)
        except OSError as error:
            raise ArchiveError(f"cannot read {name}: {error.strerror}", "check the archive's files") from error
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size != self.sizes[name]:
            os.close(handle)
            raise ArchiveError(f"{name} was changed while it was read", "import the archive again")
        return ArchiveFile(handle, name, 0, info.st_size, owned=True)


class _Tar(ArchiveInput):
    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        super().__init__(limits)
        self._starts: dict[str, int] = {}
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._index(os.fstat(self._handle).st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._handle)

    def open(self, name: str) -> ArchiveFile:
        return ArchiveFile(self._handle, name, self._starts[name], self.sizes[name], owned=False)

    def _index(self, total: int) -> None:
        at = 0
        while True:
            header = os.pread(self._handle, TAR_BLOCK, at)
            if header == b"\0" * TAR_BLOCK:
                return
            if len(header) < TAR_BLOCK:
                raise ArchiveError("the tar ends before its end mark", "it was cut off: get it again")
            name, size = _parse_header(header)
            at += TAR_BLOCK
            if size > total - at:
                raise ArchiveError(f"the tar names {size:,} bytes for {name[:80]!r}, and is shorter", "get it again")
            self._admit(name, size)
            self._starts[name] = at
            at += size + -size % TAR_BLOCK


def _parse_header(header: bytes) -> tuple[str, int]:
    """Name and size of a plain file. Raises ArchiveError for anything else."""
    wrong = ArchiveError("a header of the tar is damaged", "it is no tar, or was damaged: get it again")
    checksum = sum(header[:148]) + 8 * 32 + sum(header[156:])
    if header[257:262] != b"ustar" or _number(header[148:156]) != checksum:
        raise wrong
    raw = header[:100].split(b"\0", 1)[0]
    try:
        name = raw.decode("ascii")
    except UnicodeDecodeError:
        name = raw.decode("ascii", "backslashreplace")
    kind = header[156:157]
    if kind not in (b"0", b"\0"):
        what = _TAR_TYPES.get(kind, "an entry of an extension")
        raise ArchiveError(f"the tar holds {what}: {name[:80]!r}", _FOREIGN)
    if header[345:500].strip(b"\0"):
        raise ArchiveError(f"the tar holds a file in a folder: {name[:80]!r}", _FOREIGN)
    size = _number(header[124:136])
    if size is None:
        raise wrong
    return name, size


def _number(field: bytes) -> int | None:
    """An octal field, or GNU's base 256 for sizes from 8 GiB on."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip(b" ")
    return int(text, 8) if re.fullmatch(rb"[0-7]+", text) else None
