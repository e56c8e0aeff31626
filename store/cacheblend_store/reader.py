"""Reading: one LMDB read transaction, every page checked before LMDB walks it, every value against its digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cacheblend_store.errors import BadBlob, StoreCorrupt
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.layouts import blob_layout
from cacheblend_store.format.records import (
    ChunkManifest,
    DocumentRecord,
    blob_digest,
    blob_hasher,
    decode_document,
    decode_manifest,
)
from cacheblend_store.lmdb_file.pages import PageReader
from cacheblend_store.state import State, read_state, state_value

COPY_PIECE = 1 << 18  # bytes: fits a core's own cache


class StoreReader:
    """One read transaction. All views are into the map and end with it: copy what is to outlive it.

    A reader belongs to one thread: threads that load in parallel open one each (it costs microseconds). xxhash and
    the copies of `copy_layer` release the GIL, so such threads do run at once.
    """

    def __init__(self, transaction: Any, dbs: Mapping[str, Any], pages: PageReader, *, copies: bool = False) -> None:
        """copies: values are read from the file, not viewed in the map: for a snapshot that a writer may overwrite."""
        self._txn, self._dbs, self.pages, self._copies = transaction, dbs, pages, copies

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """Raises BadBlob when the record is damaged."""
        value = self.get("chunks", key)
        return None if value is None else decode_manifest(key, value)

    def layer(self, chunk: ChunkManifest | bytes, layer: int) -> dict[str, memoryview]:
        """The tensors of one layer's blob as views. Raises BadBlob when it is missing, damaged or of another shape.

        chunk: the manifest, or the key (then the manifest is read first; unknown: BadBlob).
        """
        manifest = self._manifest_of(chunk)
        blob = self.blob(manifest, layer)
        if blob_digest(manifest.key, layer, manifest.num_tokens, blob) != manifest.blob_digests[layer]:
            raise bad_blob(manifest, layer, "does not match its digest")
        return _parts(manifest, layer, blob)

    def copy_layer(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview]) -> None:
        """Copy the tensors of one layer's blob to `targets`, each of just its size. Raises BadBlob as `layer` does.

        What is checked is the copy, piece by piece while it is in the processor's cache: the map is read once, and
        nothing that happens to it afterwards matters. The copies and the digest release the GIL.
        """
        import numpy as np  # here: listing chunks does without it

        blob = self.blob(manifest, layer)
        parts = _parts(manifest, layer, blob)
        digest = blob_hasher(manifest.key, layer, manifest.num_tokens)
        digest.update(blob[: len(blob) - sum(len(part) for part in parts.values())])
        for name, part in parts.items():
            source, target = np.frombuffer(part, np.uint8), np.frombuffer(targets[name], np.uint8)
            for start in range(0, len(part), COPY_PIECE):
                piece = target[start : start + COPY_PIECE]
                np.copyto(piece, source[start : start + COPY_PIECE])
                digest.update(piece)
        if digest.digest() != manifest.blob_digests[layer]:
            raise bad_blob(manifest, layer, "does not match its digest")

    def blob(self, manifest: ChunkManifest, layer: int) -> memoryview:
        """One layer's bytes as they are stored: a view, its length checked and its digest not."""
        if not manifest.has_kv:
            raise bad_blob(manifest, layer, "is not there: the chunk has no KV now")
        blob = self.get("blobs", blob_key(manifest.key, layer))
        if blob is None:
            raise bad_blob(manifest, layer, "is missing")
        if len(blob) != manifest.blob_sizes[layer]:
            raise bad_blob(manifest, layer, f"has {len(blob)} bytes, and {manifest.blob_sizes[layer]} were written")
        return blob

    def get(self, database: str, key: bytes) -> memoryview | None:
        """A value as a view. Raises StoreCorrupt when a page on the way to it is damaged."""
        tree = self.pages.tree(database.encode())
        node = self.pages.get(tree, key) if tree else None
        if node is None:
            return None
        if self._copies:
            return memoryview(self.pages.value(node))
        value = self._txn.get(key, db=self._dbs[database])
        if value is None or len(value) != node.size:
            raise StoreCorrupt("the store changed under a read transaction", "its files must not be touched by hand")
        return memoryview(value)

    def keys_from(self, start: bytes, database: str = "chunks") -> Iterator[bytes]:
        """Keys of a database from `start` on, in order."""
        tree = self.pages.tree(database.encode())
        for node in self.pages.nodes(tree, start) if tree else ():
            yield node.key

    def document(self, key: bytes) -> DocumentRecord | None:
        """None when there is none or it is damaged."""
        value = self.get("documents", key)
        try:
            return None if value is None else decode_document(key, value)
        except BadBlob:
            return None

    def documents(self) -> Iterator[DocumentRecord]:
        """All that are not damaged."""
        for key in self.keys_from(b"", "documents"):
            record = self.document(key)
            if record is not None:
                yield record

    def documents_of(self, key: bytes) -> Iterator[bytes]:
        """Keys of the records of the documents that a chunk stands in."""
        for name in self.keys_from(key, "refs"):
            if not name.startswith(key):
                return
            yield name[KEY_BYTES:]

    def meta(self, name: bytes) -> bytes | None:
        value = self.get("meta", name)
        return None if value is None else bytes(value)

    def state(self) -> State:
        return read_state(state_value(self.meta), self.pages)

    def entries(self, database: str) -> int:
        tree = self.pages.tree(database.encode())
        return tree.entries if tree else 0

    def _manifest_of(self, chunk: ChunkManifest | bytes) -> ChunkManifest:
        if isinstance(chunk, ChunkManifest):
            return chunk
        manifest = self.manifest(chunk)
        if manifest is None:
            raise BadBlob(f"chunk {chunk.hex()[:12]} is not there", key=chunk, reason="is not there")
        return manifest


def _parts(manifest: ChunkManifest, layer: int, blob: memoryview) -> dict[str, memoryview]:
    try:
        return blob_layout(manifest.codec, manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim).parse(blob)
    except BadBlob as error:
        raise bad_blob(manifest, layer, f"does not read: {error.message}") from error


def bad_blob(manifest: ChunkManifest, layer: int, reason: str) -> BadBlob:
    return BadBlob(f"layer {layer} of chunk {manifest.id[:12]} {reason}", key=manifest.key, layer=layer, reason=reason)
