"""The files of an archive, which is a tar of flat files. No name, type or size of one is trusted."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cacheblend_store.errors import ArchiveError

MANIFEST, SIGNATURE, SUFFIX = "manifest.jsonl", "manifest.hmac", ".safetensors"
DAMAGED = "the archive is damaged or was cut off: get it again"
_NAME = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(SIGNATURE)}|[0-9a-f]{{40}}{re.escape(SUFFIX)}")
_FOREIGN = "it was not made by cacheblend chunks export"
Add = Callable[[str, bytes], object]
"""Adds a file: its name and what is in it."""


@dataclass(frozen=True)
class ArchiveOptions:
    """What an archive is written or read with. sign_key: a secret, for a signature over the manifest. salt: what the chunks
    are stored with; it is not written. rename: from a source in the store to what the archive calls it, or back.
    max_entries, max_bytes: the most that is taken in, files and bytes of all of them."""

    sign_key: bytes | None = None
    salt: str = ""
    rename: Callable[[str], str] = str
    max_entries: int = 100_000
    max_bytes: int = 100 << 30


NO_OPTIONS = ArchiveOptions()


class _PlainFile(tarfile.TarInfo):
    """Of a tar's headers only those of plain files are taken: links, devices, folders and extended headers, which can
    claim any size, are refused before tarfile acts on them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainFile:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ArchiveError(f"the tar holds an entry that is no plain file: {info.name[:80]!r}", _FOREIGN)
        return info


class ArchiveFiles:
    """The files of a tar, every one of a name that an export has. sizes: bytes of each, by name."""

    def __init__(self, tar: tarfile.TarFile, options: ArchiveOptions) -> None:
        """Raises ArchiveError for a name that no export has, one that is there twice, and more than the options allow."""
        self._tar, self._members, total = tar, dict[str, tarfile.TarInfo](), 0
        for member in tar:
            if not _NAME.fullmatch(member.name):
                raise ArchiveError(f"the archive holds a file that no export has: {member.name[:80]!r}", _FOREIGN)
            if member.name in self._members:
                raise ArchiveError(f"the archive holds {member.name} twice", _FOREIGN)
            self._members[member.name] = member
            total += member.size
            if len(self._members) > options.max_entries:
                raise ArchiveError(f"the archive holds more than {options.max_entries:,} files", "raise --max-entries")
            if total > options.max_bytes:
                raise ArchiveError(f"the archive holds more than {options.max_bytes:,} bytes", "raise --max-bytes")
        self.sizes = {name: member.size for name, member in self._members.items()}

    def read(self, name: str, most: int) -> bytes:
        """Raises ArchiveError for a file that is not there, or has more than `most` bytes."""
        if self.sizes.get(name, most + 1) > most:
            raise ArchiveError(
                f"{name} is missing or too long: this is no export", "make one: cacheblend chunks export PATH"
            )
        file = self._tar.extractfile(self._members[name])
        assert file is not None
        return file.read()


@contextmanager
def open_archive(path: Path, options: ArchiveOptions) -> Iterator[ArchiveFiles]:
    """Raises FileNotFoundError, and ArchiveError for what is no export or over the limits."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ArchiveError(f"{path} is no file", "name a tar that cacheblend chunks export made")
    try:
        with tarfile.open(path, "r:", tarinfo=_PlainFile) as tar:
            yield ArchiveFiles(tar, options)
    except tarfile.TarError as error:
        raise ArchiveError(f"{path} does not read as a tar: {error}", DAMAGED) from error


@contextmanager
def create_archive(path: Path, *, force: bool) -> Iterator[Add]:
    """A tar, for its owner alone, as KV is as private as the text it came from. It appears whole at the end, or not at all.

    force: a file that is there is replaced. Raises ArchiveError when something is in the way.
    """
    if os.path.lexists(path) and (path.is_dir() or not force):
        raise ArchiveError(f"{path} is there already", "name another path; --force replaces a file")
    beside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with (
            open(beside, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            yield lambda name, data: tar.addfile(_header(name, data), io.BytesIO(data))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _header(name: str, data: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    return info
