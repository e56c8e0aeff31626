"""The store's records of a request's chunks, each read once."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import Any

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, StoreReader

from cacheblend_cli.corpus.citations import Citation, Citations
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.types import Scope


class StoredChunks:
    """Manifests and documents of chunks, each read once, in one read transaction that begins with the first of them. A
    context manager, for one thread. store: None for none, which has no chunk. cite_first: see `Citations`."""

    def __init__(self, store: ChunkStore | None, cite_first: Scope | None = None) -> None:
        self._store, self._cite_first, self._open = store, cite_first, ExitStack()
        self._found: dict[bytes, ChunkManifest | None] = {}
        self._damaged: dict[bytes, BadBlob] = {}

    def __enter__(self) -> StoredChunks:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def get(self, key: bytes) -> ChunkManifest | None:
        """Return the chunk's record, None if it is missing or damaged."""
        if key not in self._found and self._store is not None:
            try:
                self._found[key] = self._reader.manifest(key)
            except BadBlob as error:
                self._found[key], self._damaged[key] = None, error
        return self._found.get(key)

    def named(self, key: bytes) -> ChunkManifest:
        """Return the record of a chunk that must be there. Raises NotFoundError."""
        if (manifest := self.get(key)) is not None:
            return manifest
        if (damage := self.damage(key)) is not None:
            raise NotFoundError(
                f"the record of chunk {key.hex()[:12]} is damaged: {damage.message}",
                "run cacheblend precompute on its document again",
            ) from damage
        raise NotFoundError(f"no chunk {key.hex()[:12]} in the store", "list the ids: cacheblend chunks ls")

    def has_kv(self, key: bytes) -> bool:
        manifest = self.get(key)
        return manifest is not None and manifest.has_kv

    def damage(self, key: bytes) -> BadBlob | None:
        """Return why the record of a chunk that was looked for could not be read, if it is damaged."""
        return self._damaged.get(key)

    def cite(self, manifest: ChunkManifest) -> Citation:
        """Return the document that the chunk stands in."""
        return self._citations.of(manifest)

    @property
    def damaged_documents(self) -> bool:
        """Return whether the record of a document that was looked up could not be read."""
        return "_citations" in vars(self) and self._citations.damaged

    @cached_property
    def _reader(self) -> StoreReader:
        assert self._store is not None
        return self._open.enter_context(self._store.read())

    @cached_property
    def _citations(self) -> Citations:
        assert self._store is not None
        return Citations(self._store, self._cite_first, self._reader)
