"""Files and directories to documents: text with its source name and content digest, or a reason why not."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli.corpus.layout import PLAIN, Kind, Layout
from cacheblend_cli.corpus.places import STDIN, place_of, text_of
from cacheblend_cli.errors import NotFoundError, UsageError

SUFFIXES = (".md", ".markdown", ".txt", ".rst", ".adoc", ".org", ".text")
MAX_BYTES = 256 << 20
_KINDS: dict[str, Kind] = {".md": "markdown", ".markdown": "markdown", ".rst": "rst"}


@dataclass(frozen=True)
class Document:
    """source: its name, see corpus/places.py. root: the name of the path that led to it. digest: blake2b-128 of the text,
    hex. layout: how it lies in its file.

    Line ends are "\\n", and the text ends with one, so that a chunk never runs into the one after it in a prompt.
    """

    source: str
    text: str
    root: str = ""
    layout: Layout = PLAIN

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """A file that is no document, and why. typed: the path that led to it. unread: it may be one, nobody could look."""

    source: str
    reason: str
    typed: str
    unread: bool = False


def read_documents(paths: Sequence[str]) -> Iterator[Document | Skipped]:
    """The documents under `paths` in sorted order. "-" is stdin. In directories only SUFFIXES are read, hidden names not.

    A file reached twice is read once. Raises NotFoundError for a path that is not there, before anything is read, and
    UsageError for a directory that cannot be listed.
    """
    check_paths(paths)
    seen: set[str] = set()
    for name in paths:
        root = place_of(name)
        for file in [Path(STDIN)] if name == STDIN else _walk(Path(name), ()):
            source = root if name == STDIN else place_of(str(file))
            if source in seen:
                continue
            seen.add(source)
            try:
                text = _decode(sys.stdin.buffer.read() if name == STDIN else _read(file))
                yield Document(source, text, root, Layout(_KINDS.get(file.suffix.lower(), "text")))
            except _NoDocument as found:
                yield Skipped(source, found.reason, text_of(str(file)), found.unread)


def check_paths(paths: Sequence[str]) -> None:
    """Raises NotFoundError for the first path that is not there."""
    for name in paths:
        if name != STDIN and not os.path.lexists(name):
            raise NotFoundError(f"no such file or directory: {name}", "check the path")


def _walk(path: Path, parents: tuple[Path, ...]) -> Iterator[Path]:
    """`path` when it is a file, else the documents below it. A link to a directory above itself is not followed."""
    if not path.is_dir():
        yield path
        return
    resolved = path.resolve()
    if resolved in parents:
        return
    try:
        entries = sorted(path.iterdir())
    except OSError as error:  # to go on would be to take the documents in it for deleted ones
        raise UsageError(f"cannot list {path}: {error.strerror}", "check its permissions") from error
    for entry in entries:
        if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix.lower() in SUFFIXES):
            yield from _walk(entry, (*parents, resolved))


class _NoDocument(Exception):
    """Why a file is none."""

    def __init__(self, reason: str, unread: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.unread = reason, unread


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise _NoDocument("not a regular file" if file.exists() else "a broken link")
        if file.stat().st_size > MAX_BYTES:
            raise _NoDocument(f"larger than {MAX_BYTES >> 20} MiB")
        return file.read_bytes()
    except OSError as error:
        raise _NoDocument(f"unreadable: {error.strerror}", unread=True) from error


def _decode(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _NoDocument("UTF-16, not UTF-8")
    if b"\0" in data:
        raise _NoDocument("binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _NoDocument(f"invalid UTF-8 at byte {error.start}") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _NoDocument("empty")
    return text if text.endswith("\n") else text + "\n"
