"""Read files and directories as documents (text, name and digest), or say why a file is skipped."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from cacheblend_cli.corpus.conversions import Conversions
from cacheblend_cli.corpus.converters import converter_of
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.converters.process import ConverterProcess
from cacheblend_cli.corpus.converters.text import from_markdown
from cacheblend_cli.corpus.file_state import FileState
from cacheblend_cli.corpus.layout import PLAIN as PLAIN_LAYOUT
from cacheblend_cli.corpus.layout import Converted, TextLayout
from cacheblend_cli.corpus.places import STDIN, place_of, place_within, text_of
from cacheblend_cli.corpus.selection import ALL, Selection
from cacheblend_cli.corpus.walk import too_large, unwanted, walk
from cacheblend_cli.errors import NotFoundError

MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Document:
    """Text of a document, and the file it comes from."""

    source: str  # document name, see corpus/places.py
    text: str  # line ends are "\n"; the text ends with one, so that chunks do not run into each other in a prompt
    root: str = ""  # name of the path that the user gave, the file itself or a directory above it
    layout: TextLayout = PLAIN_LAYOUT
    path: str = field(default="", compare=False)  # file it was read from
    state: FileState | None = field(default=None, compare=False)  # of that file, just before reading

    @property
    def digest(self) -> str:
        """blake2b-128 of the text, in hex."""
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A document without its text, so that a corpus need not fit in memory. Fields without a comment: see Document."""

    source: str
    root: str
    digest: str
    note: str = ""  # warning about the conversion: what it left out
    path: str = ""  # file to read the document from
    document: Document | None = None  # the document itself if it cannot be read again (stdin)
    state: FileState | None = None

    @classmethod
    def of(cls, document: Document) -> DocumentFile:
        kept, note = document if document.path in ("", STDIN) else None, document.layout.note
        state = None if document.state is None else replace(document.state, note=note)
        return cls(document.source, document.root, document.digest, note, document.path, kept, state)

    def read(self, conversions: Conversions) -> Document:
        """Read the document again. Raises NoDocument if it cannot be read any more, or has changed."""
        if self.document is not None:
            return self.document
        file = Path(self.path)
        converted = conversions.of(file, partial(_convert, file, conversions.process))
        document = Document(self.source, converted.text, self.root, converted.layout, self.path)
        if document.digest != self.digest:
            raise NoDocument("changed while it was read", unread=True)
        return document


@dataclass(frozen=True)
class Skipped:
    """A skipped file."""

    source: str  # document name, see corpus/places.py
    reason: str
    typed: str  # path as the user typed it, or below such a path
    unread: bool = False  # the file could not be read, so it may be a document
    group: str = ""  # label to count similar files under
    named: bool = False  # the user named this file, not a directory above it
    by_rule: bool = False  # a rule says not to open files like this


def read_documents(
    paths: Sequence[str],
    listed: Sequence[str] = (),
    select: Callable[[str], Selection] = lambda path: ALL,
    conversions: Conversions | None = None,
    known: Mapping[str, tuple[FileState, str]] = MappingProxyType({}),
) -> Iterator[Document | DocumentFile | Skipped]:
    """Yield the documents under `paths` in sorted order, then the `listed` files. "-" is stdin.

    In directories and lists, these files are skipped: files without a converter, hidden files, ignored files, and files
    that select(path) excludes. A file in `paths` is always read. A file that is reached twice is read once. Raises
    NotFoundError for a missing path, before anything is read, and UsageError for a directory that cannot be listed.

    conversions: cache of converted files.
    known: maps source to the state and digest of files read before; unchanged files are yielded as DocumentFile.
    """
    check_paths((*paths, *listed))
    conversions = conversions or Conversions()
    seen, folders = set[str](), dict[str, str]()
    for name in (*paths, *listed):
        root, is_listed = place_of(name), name not in paths
        selection = select(name)
        is_folder = name != STDIN and os.path.isdir(name)
        named = not is_folder and not is_listed
        for file, why in walk(Path(name), selection) if is_folder else [(Path(name), None)]:
            if is_folder and not os.path.islink(file):
                source = place_within(os.path.join(os.curdir, file.parent), text_of(file.name), folders)
            else:
                source = root if name == STDIN else place_of(os.path.join(os.curdir, file))
            if source in seen:
                continue
            seen.add(source)
            if is_listed and not is_folder and name != STDIN:
                why = unwanted(file, selection)
            try:
                if why is not None:
                    raise why
                if name == STDIN:
                    converted = _stdin()
                    yield Document(source, converted.text, root, converted.layout, STDIN)
                    continue
                state, (old, digest) = FileState.of(str(file)), known.get(source, (None, ""))
                if state is not None and old is not None and old.still_holds(state):
                    yield DocumentFile(source, root, digest, old.note, str(file), state=old)
                    continue
                converted = conversions.of(file, partial(_convert, file, conversions.process))
                yield Document(source, converted.text, root, converted.layout, str(file), state)
            except NoDocument as no:
                yield Skipped(source, no.reason, text_of(str(file)), no.unread, no.group, named, no.by_rule)


def check_paths(paths: Sequence[str]) -> None:
    """Raise NotFoundError for the first missing path."""
    for name in paths:
        if name != STDIN and not os.path.lexists(name):
            raise NotFoundError(f"no such file or directory: {name}", "check the path")


def convert_bytes(source: str, file_name: str, data: bytes) -> Document:
    """Convert the bytes of a file to a document. The suffix of file_name selects the converter.

    Raises NoDocument if there is no converter, or the file has no text or cannot be read.
    """
    if converter_of(file_name) is None:
        raise NoDocument("a kind of file without a converter", by_rule=True)
    process = ConverterProcess()
    try:
        converted = _ended(process.convert(file_name, data))
    finally:
        process.close()
    return Document(source, converted.text, layout=converted.layout)


def _stdin() -> Converted:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NoDocument(f"more than {MAX_BYTES >> 20} MB on stdin")
    return _ended(from_markdown(data))


def _convert(file: Path, process: ConverterProcess) -> Converted:
    return _ended(process.convert(file.name, _bytes(file)))


def _ended(converted: Converted) -> Converted:
    """Make the text end with a line end. Raises NoDocument for a file without text."""
    if not converted.text.strip():
        raise NoDocument("empty")
    text = converted.text if converted.text.endswith("\n") else converted.text + "\n"
    return replace(converted, text=text)


def _bytes(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise NoDocument("not a regular file" if file.exists() else "a broken link")
        if (large := too_large(file, MAX_BYTES)) is not None:
            raise large
        return file.read_bytes()
    except OSError as error:
        raise NoDocument(f"unreadable: {error.strerror}", "unreadable", unread=True) from error
