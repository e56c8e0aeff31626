"""Citations: the current document of a stored chunk. It may have been renamed since the chunk was computed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from cacheblend_documents.converted import bounded_omissions, shortened
from cacheblend_store import (
    NOWHERE,
    ChunkManifest,
    ChunkStore,
    DocumentRecord,
    Locator,
    StoreError,
    StoreReader,
)

from cacheblend_cli.corpus.places import SENT, bounded, is_file, is_stdin, on_disk, shown
from cacheblend_cli.corpus.scopes import holds, project_scope
from cacheblend_cli.types import Scope

TITLE = "title"
"""Key of a document's title in its record's settings."""
OMISSIONS = "omissions"
"""Key of a document's omissions in its record's settings."""
FILE_GONE = "file no longer on disk"
FILE_CHANGED = "changed since it was read: run precompute"
_MANY = 256  # chunks: after these, read all documents at once


@dataclass(frozen=True, slots=True)
class StoredText:
    """Text of a document when it was stored."""

    digest: str  # see corpus/documents.py: Document.digest
    updated: float  # seconds since the epoch
    # fields of a FileState when the file was read; empty if unknown
    file: Mapping[str, Any] = field(default_factory=dict)

    def is_outdated(self, path: str) -> bool:
        """Return whether the file differs now, by size and modification time. Short plain text is compared, too."""
        try:
            now = os.stat(path)
        except OSError:
            return False
        if self.file:
            is_same = (now.st_size, now.st_mtime_ns) == (self.file.get("size"), self.file.get("mtime_ns"))
        else:
            is_same = now.st_mtime_ns <= self.updated * 1e9
        if is_same:
            return False
        from cacheblend_cli.corpus.documents import plain_digest  # with converters, which an answer seldom needs

        return plain_digest(path) != self.digest


@dataclass(frozen=True)
class Citation:
    """A document that contains a chunk, and the chunk's place in it."""

    name: str  # document name, see corpus/places.py
    index: int  # position of the chunk in the document
    locator: Locator = NOWHERE  # part, lines and headings for a reader
    title: str = ""  # title of a document that was uploaded with one
    omissions: tuple[str, ...] = ()  # parts left out of the document, in words
    text: StoredText | None = None  # None for a chunk without a document
    others: tuple[str, ...] = ()  # names of other documents with the chunk

    @property
    def source(self) -> str:
        """The document's name relative to the current directory."""
        return shown(self.name)

    @property
    def place(self) -> str:
        """Place of the chunk in words: "lines 3-9", with a remark if the file is not on disk or differs now."""
        return ", ".join(filter(None, (self.locator.text, self._remark)))

    @property
    def also_in(self) -> tuple[str, ...]:
        """Names of other documents with the chunk, relative to the current directory."""
        return tuple(map(shown, self.others))

    @property
    def _remark(self) -> str:
        if not is_file(self.name) or is_stdin(self.name):
            return ""
        if (path := on_disk(self.name)) is None:
            return FILE_GONE
        return FILE_CHANGED * (self.text is not None and self.text.is_outdated(path))


class Citations:
    """Look up the documents of a store's chunks.

    If several documents share a chunk, documents in the scope (by default the current project) come first, then
    documents that are still on disk, then short paths: copies have longer names. `damaged` is True after a document
    record could not be read: its chunks are then cited only by the name in their manifest.
    """

    def __init__(self, store: ChunkStore, scope: Scope | None = None, reader: StoreReader | None = None) -> None:
        """reader: an open read transaction of the store, or None to open one per look-up."""
        self._store, self._scope = store, scope or project_scope(store)
        self._reader = reader
        self._documents: dict[bytes, DocumentRecord | None] = {}
        self._files: dict[bytes, Mapping[str, Any]] = {}  # states of files when they were read, if known
        self._places: dict[bytes, list[Citation]] | None = None  # places of all chunks, read after _MANY look-ups
        self._asked, self.damaged = 0, False

    def all_of(self, manifest: ChunkManifest) -> list[Citation]:
        """Return all documents of the chunk, the one to cite first.

        A chunk without a document gets the name in its manifest.
        """
        found = self._of(manifest.key) or [Citation(manifest.source, manifest.index)]
        if len(found) == 1:
            return found
        return sorted(
            found, key=lambda c: (not holds(self._scope, c.name), on_disk(c.name) is None, len(c.name), c.name)
        )

    def of(self, manifest: ChunkManifest) -> Citation:
        """Return the document to cite, with the names of the others in the scope."""
        first, *rest = self.all_of(manifest)
        others = [c.name for c in rest if holds(self._scope, c.name) == holds(self._scope, first.name)]
        return replace(first, others=tuple(name for name in others if not name.startswith(SENT))) if others else first

    def _reading(self) -> AbstractContextManager[StoreReader]:
        return self._store.read() if self._reader is None else nullcontext(self._reader)

    def _of(self, key: bytes) -> list[Citation]:
        """Return the first place of the chunk in each document."""
        self._asked += 1
        try:
            if self._places is None and self._asked > _MANY:
                with self._reading() as reader:
                    self._places = _places(reader.documents())
            if self._places is not None:
                return self._places.get(key, [])
            with self._reading() as reader:
                names = list(reader.documents_of(key))
                new = [name for name in names if name not in self._documents]
                self._documents |= {name: reader.document(name) for name in new}
                self._files |= {name: summary.file for name in new if (summary := reader.summary(name))}
            records = [self._documents[name] for name in names]
            self.damaged |= None in records
            return _places(records, self._files).get(key, [])
        except StoreError:  # the manifest has a name
            self.damaged = True
            return []


def title_of(record: DocumentRecord) -> str:
    """Return the title that a document was uploaded with, "" without one."""
    return shortened(str(record.settings.get(TITLE, "")))


def omissions_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the omissions of a document. settings: those of its record."""
    found = settings.get(OMISSIONS)
    return bounded_omissions(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


def _places(
    records: Iterable[DocumentRecord | None], files: Mapping[bytes, Mapping[str, Any]] = MappingProxyType({})
) -> dict[bytes, list[Citation]]:
    """Map each chunk key to the first place of the chunk in each document. files: by key of the document."""
    found: dict[bytes, list[Citation]] = {}
    for record in filter(None, records):
        text = StoredText(record.content_digest, record.updated, files.get(record.key, {}))
        about = title_of(record), omissions_of(record.settings), text
        for chunk in record.chunks:
            places = found.setdefault(chunk.key, [])
            if all(place.name != record.source for place in places):
                places.append(Citation(record.source, chunk.index, bounded(chunk.locator), *about))
    return found
