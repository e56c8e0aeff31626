"""Reading: one snapshot, every page of it checked before it is followed, every value against its digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile

from cacheblend_store.errors import BadBlob, StoreError
from cacheblend_store.format.blobs import BlobSpec, blob_prefix, blob_size, blob_spec, encode_blob
from cacheblend_store.format.changes import LOG, Changes, changes_between
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import (
    MEMO_KEYS,
    ChunkManifest,
    DocumentRecord,
    Memo,
    blob_hasher,
    decode_document,
    decode_manifest,
    decode_memo,
)
from cacheblend_store.lmdb_file.pages.layout import Node
from cacheblend_store.lmdb_file.pages.reader import PageReader
from cacheblend_store.state import State, read_state


class StoreReader:
    """What one commit left, whatever is written meanwhile. What it gives are copies, which outlive it.

    A reader belongs to one thread: threads that load in parallel open one each (it costs microseconds). xxhash and
    the reads from the file release the GIL, so such threads do run at once.
    """

    def __init__(self, pages: PageReader) -> None:
        self.pages = pages

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """Raises BadBlob when the record is damaged."""
        value = self.get("chunks", key)
        return None if value is None else decode_manifest(key, value)

    def has_kv(self, key: bytes) -> bool:
        """Whether the chunk is there and has KV, by its undamaged record. Its blobs are not looked at."""
        with suppress(BadBlob):
            manifest = self.manifest(key)
            return manifest is not None and manifest.has_kv
        return False

    def manifests(self) -> Iterator[ChunkManifest]:
        """All that are not damaged, in order of their keys."""
        return filter(None, map(self.undamaged, self.keys_from(b"")))

    def undamaged(self, key: bytes) -> ChunkManifest | None:
        """The manifest, None when there is none or it is damaged."""
        try:
            return self.manifest(key)
        except StoreError:
            return None

    def layer(self, manifest: ChunkManifest, layer: int) -> dict[str, memoryview]:
        """The tensors of one layer's blob. Raises BadBlob when it is missing, damaged or of another shape."""
        self._blob_node(manifest, layer)  # so that no more room is made than there are bytes
        parts = {name: memoryview(bytearray(tensor.num_bytes)) for name, tensor in _spec(manifest).items()}
        self.copy_layer(manifest, layer, parts)
        return parts

    def copy_layer(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview]) -> None:
        """Copy the tensors of one layer's blob to `targets`, each of just its size. Raises BadBlob as `layer` does.

        What is checked is the copy. One read and one digest a tensor: each lets go of the GIL, which others want meanwhile.
        """
        node, spec = self._blob_node(manifest, layer), _spec(manifest)
        prefix = blob_prefix(spec)
        parts = [memoryview(bytearray(len(prefix))), *(targets[name].cast("B") for name in spec)]
        self.pages.read_into(node, parts)
        if parts[0] != prefix:
            raise bad_blob(manifest, layer, "has a header that is not that of the tensors it should hold")
        digest = blob_hasher(manifest.key, layer, manifest.num_tokens)
        for part in parts:
            digest.update(part)
        if digest.digest() != manifest.blob_digests[layer]:
            raise bad_blob(manifest, layer, "does not match its digest")

    def blob(self, manifest: ChunkManifest, layer: int) -> bytes:
        """One layer's bytes as they are stored. Raises BadBlob as `layer` does."""
        return encode_blob(_spec(manifest), self.layer(manifest, layer))

    def _blob_node(self, manifest: ChunkManifest, layer: int) -> Node:
        if not manifest.has_kv:
            raise bad_blob(manifest, layer, "is not there: the chunk has no KV now")
        node = self.pages.get("blobs", blob_key(manifest.key, layer))
        if node is None:
            raise bad_blob(manifest, layer, "is missing")
        wanted = blob_size(_spec(manifest))
        if node.size != wanted or manifest.blob_sizes[layer] != wanted:
            raise bad_blob(manifest, layer, f"has {node.size} bytes, and {wanted} are implied")
        return node

    def get(self, database: str, key: bytes) -> memoryview | None:
        """A value. Raises StoreCorrupt when a page on the way to it is damaged."""
        node = self.pages.get(database, key)
        return None if node is None else self.pages.value(node)

    def keys_from(self, start: bytes, database: str = "chunks") -> Iterator[bytes]:
        """Keys of a database from `start` on, in order."""
        for node in self.pages.nodes(database, start):
            yield node.key

    def keys_with(self, prefix: bytes, database: str) -> Iterator[bytes]:
        """Keys of a database that begin with `prefix`, in order."""
        return takewhile(lambda key: key.startswith(prefix), self.keys_from(prefix, database))

    def document(self, key: bytes) -> DocumentRecord | None:
        """None when there is none or it is damaged."""
        value = self.get("documents", key)
        try:
            return None if value is None else decode_document(key, value)
        except BadBlob:
            return None

    def documents(self) -> Iterator[DocumentRecord]:
        """All that are not damaged."""
        return filter(None, map(self.document, self.keys_from(b"", "documents")))

    def documents_of(self, key: bytes) -> Iterator[bytes]:
        """Keys of the records of the documents that a chunk stands in."""
        for name in self.keys_with(key, "refs"):
            yield name[KEY_BYTES:]

    def memo(self, key: bytes) -> Memo | None:
        """None when there is none, it is damaged, or of a version that is not known."""
        with suppress(BadBlob):
            return decode_memo(key, self.get("meta", key) or b"")
        return None

    def memos(self) -> Iterator[Memo]:
        return filter(None, map(self.memo, self.keys_with(MEMO_KEYS, "meta")))

    def state(self) -> State:
        return read_state(self.get, self.pages)

    def changes_since(self, generation: int) -> Changes | None:
        """Return what changed after a generation of the store, None where the change log does not know all of it."""
        return changes_between(self.get("meta", LOG), generation, self.state().generation)

    def entries(self, database: str) -> int:
        tree = self.pages.tree(database)
        return tree.entries if tree else 0


def _spec(manifest: ChunkManifest) -> BlobSpec:
    return blob_spec(manifest.codec, manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim)


def bad_blob(manifest: ChunkManifest, layer: int, reason: str) -> BadBlob:
    return BadBlob(f"layer {layer} of chunk {manifest.id[:12]} {reason}", key=manifest.key, layer=layer, reason=reason)
