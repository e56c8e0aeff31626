"""The interface of a tier. Its methods may be called from any thread and raise TierError, never an error of a library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from cacheblend_store.format.records import ChunkManifest, DocumentRecord
from cacheblend_store.tier.layout import Head, Layout


class TierObject(NamedTuple):
    """An object as a listing gives it. modified: seconds since the epoch."""

    name: str
    size: int
    modified: float


class DocumentBundle(NamedTuple):
    """A document with the texts of its chunks. prefix_key: key of the prompt's prefix. texts: manifests without KV."""

    record: DocumentRecord
    prefix_key: bytes
    texts: tuple[ChunkManifest, ...]


class Tier(Protocol):
    """Chunks and documents that several stores share. `ObjectTier` is one.

    A put is complete or not there. Nothing that is read is trusted before `Layout` has bounded its size and `Head.layer` has
    checked its digest.
    """

    url: str

    def check(self) -> None:
        """Reach the tier and read its format. Raises TierError, which says what is wrong."""
        ...

    def size(self, collection: str, key: bytes) -> int | None:
        """Return the size of a chunk's object, or None if it is not there."""
        ...

    def layout(self, chunk: ChunkManifest, size: int) -> Layout:
        """Return the byte ranges of an object of this size with KV of the chunk's shape. Raises BadBlob if it cannot be one."""
        ...

    def read(self, collection: str, key: bytes, start: int, end: int) -> memoryview:
        """Return exactly these bytes of a chunk's object."""
        ...

    def head(self, collection: str, key: bytes, data: memoryview) -> Head:
        """Open the beginning of a chunk's object. Raises BadBlob if it is damaged, or another chunk's."""
        ...

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[bytes]) -> int:
        """Write a chunk, one blob a layer, in place of what is there. Returns the object's size."""
        ...

    def get_chunk(self, name: str, size: int) -> tuple[ChunkManifest, list[bytes]]:
        """Return the chunk of an object that `chunks` named, checked. Raises BadBlob."""
        ...

    def put_document(self, bundle: DocumentBundle) -> None:
        """Write a document and the texts of its chunks in place of what is there."""
        ...

    def get_document(self, name: str, size: int) -> DocumentBundle:
        """Return the document of an object that `documents` named, checked. Raises BadBlob."""
        ...

    def chunks(self) -> Iterator[TierObject]:
        """Yield the objects of all chunks."""
        ...

    def documents(self) -> Iterator[TierObject]:
        """Yield the objects of all documents."""
        ...

    def name(self, collection: str, key: bytes) -> str:
        """Return the name of a chunk's object."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        ...
