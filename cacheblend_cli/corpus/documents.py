"""Read files and directories as documents (text, name and digest), or say why a file is skipped.

A file's state when it was read tells whether it changed since, as in git's index: unchanged files are not read again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cacheblend_documents
from cacheblend_documents import Converted, NotConverted, OcrError, converter_process
from cacheblend_documents.formats import TEXT, Format, format_of
from cacheblend_store.conversion import convert
from msgspec import ValidationError

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.corpus.places import STDIN, is_stdin, place_of, text_of
from cacheblend_cli.corpus.walk import ALL, FoundFile, Selection, Unwanted, too_large, unwanted, walk
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.version import __version__

READ_VERSION = 6
"""Increase this when the same file gives a different text or other omissions: files are then read again."""
_RACY_NS = 2_000_000_000  # coarsest timestamp resolution in use (FAT)
_COMPARED = 1 << 20
"""Bytes of a file that is compared with its stored text only because it was touched."""
_LIBRARIES = ("selectolax", "pypdfium2", "python-calamine", "defusedxml")


@dataclass(frozen=True, slots=True)
class FileState:
    """State of a file, after following links. Times are in nanoseconds since the epoch."""

    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    reader: str  # the code that read the file, see `reader_of`
    read_ns: int  # time just before the file was read

    @classmethod
    def of(cls, path: str) -> FileState | None:
        """Return the current state of a file, None if stat fails."""
        with suppress(OSError):
            now, found = time.time_ns(), os.stat(path)
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

    def still_holds(self, now: FileState) -> bool:
        """Return whether the file is unchanged since it was read.

        False if it was modified just before reading: a later change could have left the same timestamps.
        """
        is_same = self == replace(now, read_ns=self.read_ns)
        return is_same and max(self.mtime_ns, self.ctime_ns) + _RACY_NS <= self.read_ns


def reader_of(name: str) -> str:
    """Return the converter for a file name, with versions of its package, Python and parser libraries."""
    return _reader(format_of(name) or TEXT)


@lru_cache
def _reader(found: Format) -> str:
    parts = [found.converter, *found.distributions, __version__, str(READ_VERSION), platform.python_version()]
    for package in () if found.is_plain else _LIBRARIES:
        try:
            parts.append(version(package))
        except PackageNotFoundError:
            parts.append("-")
    return " ".join(parts)


MAX_CHARACTERS = 64 << 20


class Conversions:
    """Converts files, with a cache of their texts by file state: the latest ones, up to MAX_CHARACTERS in total. Plain
    text is not cached."""

    def __init__(self) -> None:
        self._process = converter_process()
        self._known: dict[str, tuple[tuple[object, ...], Converted]] = {}
        self._characters = 0

    def of(self, file: Path, ocr: str) -> Converted:
        """Return the cached conversion if the file is unchanged, else convert it. ocr: see Selection. Raises
        NotConverted."""
        try:
            found = file.stat()
        except OSError:
            return self._convert(file, ocr)
        state = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, ocr
        name = os.path.abspath(file)
        known = self._known.get(name)
        if known is not None and known[0] == state:
            return known[1]
        converted = self._convert(file, ocr)  # a change during conversion makes `state` stale, so the entry is not used
        if not converted.keeps_lines:
            self._keep(name, state, converted)
        return converted

    def _convert(self, file: Path, ocr: str) -> Converted:
        with ocr_errors():
            return cacheblend_documents.convert(file.name, _bytes(file), ocr=ocr, process=self._process)

    def _keep(self, name: str, state: tuple[object, ...], converted: Converted) -> None:
        if name in self._known:
            self._characters -= len(self._known.pop(name)[1].text)
        self._known[name] = state, converted
        self._characters += len(converted.text)
        while self._characters > MAX_CHARACTERS:
            _, oldest = self._known.pop(next(iter(self._known)))
            self._characters -= len(oldest.text)


@contextmanager
def ocr_errors() -> Iterator[None]:
    """Convert OcrErrors to UsageErrors."""
    try:
        yield
    except OcrError as error:
        raise UsageError(str(error), f"{error.hint}; --no-ocr reads without it") from error


MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Document:
    """Text of a document, and the file it comes from."""

    source: str  # document name, see corpus/places.py
    converted: Converted  # line ends are "\n"; the text ends with one, so that chunks do not run into each other
    root: str = ""  # name of the path that the user gave, the file itself or a directory above it
    path: str = field(default="", compare=False)  # file it was read from
    state: FileState | None = field(default=None, compare=False)  # the file just before reading
    ocr: str = field(default="", compare=False)  # see Selection

    @property
    def text(self) -> str:
        return self.converted.text

    @property
    def digest(self) -> str:
        """blake2b-128 of the text, in hex."""
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16).hexdigest()

    @property
    def omissions(self) -> tuple[str, ...]:
        """Parts that the converter left out, in words."""
        return self.converted.omissions


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A document without its text, so that a corpus need not fit in memory. Fields without a comment: see Document."""

    source: str
    root: str
    digest: str
    omissions: tuple[str, ...] = ()  # parts that the converter left out, in words
    path: str = ""  # file to read the document from
    document: Document | None = None  # the document itself if it cannot be read again (stdin)
    state: FileState | None = None
    ocr: str = ""

    @classmethod
    def of(cls, document: Document) -> DocumentFile:
        kept = document if document.path in ("", STDIN) else None
        about = document.digest, document.omissions, document.path
        return cls(document.source, document.root, *about, kept, document.state, document.ocr)

    def read(self, conversions: Conversions) -> Document:
        """Read the document again. Raises NotConverted if it cannot be read any more, or has changed."""
        if self.document is not None:
            return self.document
        converted = conversions.of(Path(self.path), self.ocr)
        document = Document(self.source, converted, self.root, self.path)
        if document.digest != self.digest:
            raise NotConverted("changed while it was read", unread=True)
        return document


@dataclass(frozen=True)
class Skipped:
    source: str  # document name, see corpus/places.py
    reason: str
    typed: str  # path as the user typed it, or below such a path
    group: str = ""  # label to count similar files under
    named: bool = False  # the user named this file, not a directory above it
    by_rule: bool = False  # a rule says not to open files like this
    is_stored: bool = False  # the store has an earlier version, which stays


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that was named or found."""

    file: Path
    source: str  # document name, see corpus/places.py
    root: str  # name of the path that the user gave
    named: bool  # the user named this file, not a directory above it
    skip: NotConverted | None  # reason not to open it
    ocr: str = ""  # see Selection; "" for other files than PDF

    def skipped(self, why: NotConverted) -> Skipped:
        typed = text_of(str(self.file))
        return Skipped(self.source, why.reason, typed, why.group, self.named, isinstance(why, Unwanted))


def find_files(paths: Sequence[str], listed: Sequence[str], select: Callable[[str], Selection]) -> Iterator[Candidate]:
    """Yield the files to read and to skip, each once, without opening documents. Arguments: see `read_documents`."""
    check_paths((*paths, *listed))
    seen = set[str]()
    for name in (*paths, *listed):
        root, is_listed = place_of(name), name not in paths
        selection = select(name)
        is_folder = name != STDIN and os.path.isdir(name)
        named = not is_folder and not is_listed
        for found in walk(name, selection) if is_folder else [FoundFile(name, "")]:
            if found.real:
                source = text_of(found.real)
            else:
                source = root if name == STDIN else place_of(os.path.join(os.curdir, found.path))
            if source in seen:
                continue
            seen.add(source)
            why = found.skip
            if is_listed and not is_folder and name != STDIN:
                why = unwanted(found.path, selection)
            ocr = selection.ocr if found.path.lower().endswith(".pdf") else ""
            yield Candidate(Path(found.path), source, root, named, why, ocr)


def read_documents(
    paths: Sequence[str],
    listed: Sequence[str] = (),
    select: Callable[[str], Selection] = lambda path: ALL,
    conversions: Conversions | None = None,
    known: Mapping[str, DocumentFile] = MappingProxyType({}),
) -> Iterator[Document | DocumentFile | Skipped]:
    """Yield the documents under `paths` in sorted order, then the `listed` files. "-" is stdin.

    In directories and lists, these files are skipped: files without a converter, hidden files, ignored files, and files
    that select(path) excludes. A file in `paths` is always read. A file that is reached twice is read once. Raises
    NotFoundError for a missing path, before anything is read, and UsageError for a directory that cannot be listed.

    conversions: cache of converted files.
    known: maps source to files read before; unchanged ones are yielded as DocumentFile.
    """
    conversions = conversions or Conversions()
    for found in find_files(paths, listed, select):
        file, source, root = found.file, found.source, found.root
        try:
            if found.skip is not None:
                raise found.skip
            if is_stdin(source):
                yield Document(source, _stdin(), root, STDIN)
                continue
            state, old = FileState.of(str(file)), known.get(source)
            if state is not None and found.ocr:
                state = replace(state, reader=f"{state.reader} ocr {found.ocr}")
            if state is not None and old is not None and old.state is not None and old.state.still_holds(state):
                yield replace(old, root=root, path=str(file), ocr=found.ocr)
                continue
            yield Document(source, conversions.of(file, found.ocr), root, str(file), state, found.ocr)
        except NotConverted as no:
            yield found.skipped(no)


def plain_digest(path: str) -> str | None:
    """Return the digest of a document of plain text; None for other kinds of files, and for long or unreadable ones."""
    name = os.path.basename(path)
    with suppress(NotConverted, OSError):
        if (format_of(name) or TEXT).is_plain and os.stat(path).st_size <= _COMPARED:
            return Document("", cacheblend_documents.convert(name, _bytes(Path(path)))).digest
    return None


def check_paths(paths: Sequence[str]) -> None:
    """Raise NotFoundError for the first missing path."""
    for name in paths:
        if name != STDIN and not os.path.lexists(name):
            hint = "download it first: addresses are not read" if "://" in name else "check the path"
            raise NotFoundError(f"no such file or directory: {name}", hint)


def convert_bytes(source: str, file_name: str, data: bytes, cancellation: Cancellation | None = None) -> Document:
    """Convert the bytes of a file to a document. The suffix of file_name selects the converter.

    Raises NotConverted if there is no converter, or the file has no text or cannot be read, and Cancelled.
    """
    if format_of(file_name) is None:
        raise Unwanted("a kind of file without a converter")
    return Document(source, cacheblend_documents.convert(file_name, data, cancellation=cancellation))


def _stdin() -> Converted:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotConverted(f"more than {MAX_BYTES >> 20} MB on stdin")
    return cacheblend_documents.convert("stdin.md", data)


def _bytes(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise NotConverted("not a regular file" if file.exists() else "a broken link")
        if (large := too_large(str(file), MAX_BYTES)) is not None:
            raise large
        return file.read_bytes()
    except OSError as error:
        raise NotConverted(f"unreadable: {error.strerror}", "unreadable", unread=True) from error
