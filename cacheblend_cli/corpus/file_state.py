"""State of a file when it was read, to skip files that did not change, as git's index does."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import ValidationError, convert

from cacheblend_cli.corpus.converters import PLAIN, converter_of
from cacheblend_cli.corpus.converters.text import from_plain
from cacheblend_cli.version import __version__

READ_VERSION = 2
"""Increase this when the same file gives a different text or note: files are then read again."""
_RACY_NS = 2_000_000_000  # coarsest timestamp resolution in use (FAT)
_LIBRARIES = ("selectolax", "pypdf", "mammoth", "python-pptx", "openpyxl", "defusedxml")


@dataclass(frozen=True, slots=True)
class FileState:
    """State of a file, after following links. Times are in nanoseconds since the epoch."""

    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    reader: str  # the code that read the file, see `reader_of`
    read_ns: int  # time just before the file was read
    note: str = ""  # warning about the conversion: what it left out

    @classmethod
    def of(cls, path: str, found: os.stat_result | None = None) -> FileState | None:
        """Return the current state of a file, None if stat fails. found: its stat result, if the caller has it."""
        with suppress(OSError):
            now = time.time_ns()
            found = found or os.stat(path)
            times = found.st_mtime_ns, found.st_ctime_ns
            return cls(found.st_ino, found.st_size, *times, reader_of(os.path.basename(path)), now)
        return None

    @classmethod
    def of_summary(cls, recorded: Mapping[str, Any]) -> FileState | None:
        """Return the state from a record, None if the record does not hold a valid one."""
        try:
            return convert(recorded, cls)
        except ValidationError:
            return None

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def still_holds(self, now: FileState) -> bool:
        """Return whether the file is unchanged since it was read.

        False if it was modified just before reading: a later change could have left the same timestamps.
        """
        was, is_now = ((f.inode, f.size, f.mtime_ns, f.ctime_ns, f.reader) for f in (self, now))
        return was == is_now and max(self.mtime_ns, self.ctime_ns) + _RACY_NS <= self.read_ns


def reader_of(name: str) -> str:
    """Return the converter for a file name, with versions of this package, Python and parser libraries."""
    return _reader(converter_of(name) or from_plain)


@lru_cache
def _reader(converter: Callable[..., Any]) -> str:
    parts = [converter.__name__, __version__, str(READ_VERSION), platform.python_version()]
    for package in () if converter in PLAIN else _LIBRARIES:
        try:
            parts.append(version(package))
        except PackageNotFoundError:
            parts.append("-")
    return " ".join(parts)
