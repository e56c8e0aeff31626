"""What a stored chunk is called: the document it stands in now, whatever that was called when the chunk was computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cacheblend_store import NOWHERE, ChunkManifest, ChunkStore, DocumentChunk, DocumentRecord, Locator, StoreError

from cacheblend_cli.corpus.places import is_on_disk, shown
from cacheblend_cli.corpus.scopes import Scope, project_scope

TITLE = "title"
"""Key in a document record's settings: the title that a document was put with."""
_Place = tuple[str, DocumentChunk, str]
"""A document's name, the chunk's place in it, and the document's title."""
_MANY = 256  # chunks: from then on all documents are read at once


@dataclass(frozen=True)
class Citation:
    """A document's name (see corpus/places.py), the chunk's place in it, where a reader finds that, and the document's title
    where it was given one."""

    name: str
    index: int
    locator: Locator = NOWHERE
    title: str = ""

    @property
    def source(self) -> str:
        """The document as a person standing here types it."""
        return shown(self.name)


class Citations:
    """The documents of a store's chunks. Of several documents that share a chunk one of the scope is cited, by default one
    of the current project, and one that is still on disk before one that is not."""

    def __init__(self, store: ChunkStore, scope: Scope | None = None) -> None:
        self._store, self._scope = store, scope or project_scope(store)
        self._documents: dict[bytes, DocumentRecord | None] = {}
        self._places: dict[bytes, list[_Place]] | None = None  # of every chunk, once many were asked for
        self._asked = 0

    def all_of(self, manifest: ChunkManifest) -> list[Citation]:
        """Every document the chunk stands in, the one to cite first. A chunk of no document has the one it came from."""
        found = [Citation(name, chunk.index, chunk.locator, title) for name, chunk, title in self._of(manifest.key)]
        if not found:
            return [Citation(manifest.source, manifest.index)]
        if len(found) == 1:
            return found
        return sorted(found, key=lambda c: (not self._scope.holds(c.name), not is_on_disk(c.name), c.name))

    def of(self, manifest: ChunkManifest) -> Citation:
        return self.all_of(manifest)[0]

    def _of(self, key: bytes) -> list[_Place]:
        """Return the chunk's first place in each document."""
        self._asked += 1
        try:
            if self._places is None and self._asked > _MANY:
                self._places = _places(self._store.documents())
            if self._places is not None:
                return self._places.get(key, [])
            with self._store.read() as reader:
                names = list(reader.documents_of(key))
                self._documents |= {name: reader.document(name) for name in names if name not in self._documents}
            return _places(self._documents[name] for name in names).get(key, [])
        except StoreError:  # what is damaged is told elsewhere; the chunk has a name of its own
            return []


def _places(records: Iterable[DocumentRecord | None]) -> dict[bytes, list[_Place]]:
    """Return chunk key -> the chunk's first place in each document."""
    found: dict[bytes, list[_Place]] = {}
    for record in filter(None, records):
        for chunk in record.chunks:
            places = found.setdefault(chunk.key, [])
            if all(name != record.source for name, *_ in places):
                places.append((record.source, chunk, record.settings.get(TITLE, "")))
    return found
