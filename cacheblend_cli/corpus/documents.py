"""Files and directories to documents: text with its source name and content digest, or a reason why not."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli.errors import NotFoundError, UsageError

SUFFIXES = (".md", ".markdown", ".txt", ".rst", ".adoc", ".org", ".text")
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Document:
    """source: the path as given (directories walked, POSIX separators). digest: blake2b-128 of the text, hex."""

    source: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """A file that is no document, and why."""

    source: str
    reason: str


def read_documents(paths: Sequence[str]) -> Iterator[Document | Skipped]:
    """The documents under `paths` in sorted order. "-" is stdin. In directories only SUFFIXES are read, hidden names not.

    Raises NotFoundError for a path that is not there, before anything is read.
    """
    check_paths(paths)
    seen: set[Path] = set()
    for name in paths:
        if name == "-":
            yield _decode("-", sys.stdin.buffer.read())
            continue
        for file in _files(Path(name)):
            resolved = file.resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield _read(file)


def check_paths(paths: Sequence[str]) -> None:
    """Raises NotFoundError for the first path that is not there."""
    for name in paths:
        if name != "-" and not Path(name).exists():
            raise NotFoundError(f"no such file or directory: {name}", "check the path")


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise UsageError(f"cannot list {path}: {error.strerror}", "check its permissions") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry)
        elif entry.suffix.lower() in SUFFIXES:
            yield entry


def _read(file: Path) -> Document | Skipped:
    source = file.as_posix()
    try:
        if not file.is_file():
            return Skipped(source, "not a regular file")
        if file.stat().st_size > MAX_BYTES:
            return Skipped(source, f"larger than {MAX_BYTES >> 20} MiB")
        data = file.read_bytes()
    except OSError as error:
        return Skipped(source, f"unreadable: {error.strerror}")
    return _decode(source, data)


def _decode(source: str, data: bytes) -> Document | Skipped:
    if b"\0" in data[:65536]:
        return Skipped(source, "binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Skipped(source, f"invalid UTF-8 at byte {error.start}")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(source, text) if text.strip() else Skipped(source, "empty")
