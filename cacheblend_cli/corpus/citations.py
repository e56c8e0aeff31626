"""What a stored chunk is called: the document it stands in now, whatever that was called when the chunk was computed."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_store import ChunkManifest, ChunkStore, StoreError, StoreReader

from cacheblend_cli.corpus.places import is_on_disk, known_as, settle, shown
from cacheblend_cli.corpus.scopes import Scope, project_scope


@dataclass(frozen=True)
class Citation:
    """A document's name (see corpus/places.py) and the chunk's place in it."""

    name: str
    index: int

    @property
    def source(self) -> str:
        """The document as a person standing here types it."""
        return shown(self.name)


class Citations:
    """The documents of a store's chunks. Of several documents that share a chunk one of the scope is cited, by default one
    of the current project, and one that is still on disk before one that is not."""

    def __init__(self, store: ChunkStore, scope: Scope | None = None) -> None:
        self._store, self._scope = store, scope or project_scope(store)
        self._documents: dict[bytes, tuple[str, dict[bytes, int]]] = {}

    def all_of(self, manifest: ChunkManifest) -> list[Citation]:
        """Every document the chunk stands in, the one to cite first. A chunk of no document has the one it came from."""
        found = {Citation(name, places[manifest.key]) for name, places in self._of(manifest.key)}
        found = found or {Citation(settle(known_as(manifest.source)), manifest.index)}
        several = len(found) > 1
        return sorted(
            found, key=lambda c: (not self._scope.holds(c.name), several and not is_on_disk(c.name), c.name, c.index)
        )

    def of(self, manifest: ChunkManifest) -> Citation:
        return self.all_of(manifest)[0]

    def _of(self, key: bytes) -> list[tuple[str, dict[bytes, int]]]:
        try:
            with self._store.read() as reader:
                found = [self._document(reader, name) for name in reader.documents_of(key)]
        except StoreError:  # what is damaged is told elsewhere; the chunk has a name of its own
            return []
        return [document for document in found if key in document[1]]

    def _document(self, reader: StoreReader, key: bytes) -> tuple[str, dict[bytes, int]]:
        """A document's name and the places of its chunks; each record is read once."""
        if key not in self._documents:
            record = reader.document(key)
            name = settle(known_as(record.source, record.settings)) if record else ""
            self._documents[key] = name, {c.key: c.index for c in reversed(record.chunks)} if record else {}
        return self._documents[key]
