"""Read one snapshot of a store. Pages are checked before they are followed, and values are checked against their
digests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile

from cacheblend_store.compiled_reads import CompiledReads, Value
from cacheblend_store.errors import BadBlob, StoreCorrupt, StoreError
from cacheblend_store.format import records
from cacheblend_store.format.blobs import blob_prefix, blob_size, encode_blob
from cacheblend_store.format.changes import LOG, Changes, changes_between
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import ChunkManifest, DocumentRecord, Memo
from cacheblend_store.format.summaries import SUMMARY_KEYS, DocumentSummary, decode_summary, stamped
from cacheblend_store.lmdb_file.pages.layout import Node
from cacheblend_store.lmdb_file.pages.reader import PageReader
from cacheblend_store.state import State, read_state

Version = tuple[int, int]
"""An opening of a data.mdb in this process, and a commit: equal versions have equal contents."""


@dataclass
class LayerReads:
    """Reads of a chunk's layers of one shape, a group of layers at a time.

    places: start and end in a buffer of the tensors of each layer of the largest group. compiled: where the layers are,
    see `StoreReader.locate`.
    """

    manifest: ChunkManifest
    groups: Sequence[Sequence[int]]
    places: Sequence[Mapping[str, tuple[int, int]]]
    compiled: CompiledReads | None = None


class StoreReader:
    """A snapshot of the store at one commit. Values are copies and stay valid after the reader is closed.

    Several threads may call `copy_layer` and `read_layers` at once; everything else is for one thread.
    """

    def __init__(self, pages: PageReader, version: Version | None = None) -> None:
        """version: of the contents, None outside a transaction."""
        self.pages, self.version = pages, version
        self._look_up = threading.Lock()  # pages that were read are kept

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest of a chunk, or None if it is not stored. Raises BadBlob if the record is damaged."""
        value = self.get("chunks", key)
        return None if value is None else records.decode_manifest(key, value)

    def has_kv(self, key: bytes) -> bool:
        """Return whether an undamaged record says that the chunk has KV. Blobs are not checked."""
        manifest = records.undamaged(records.decode_manifest, key, self.get("chunks", key))
        return manifest is not None and manifest.has_kv

    def manifests(self) -> Iterator[ChunkManifest]:
        """Yield all undamaged manifests in key order."""
        return filter(None, map(self.undamaged, self.keys_from(b"")))

    def undamaged(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest, or None if it is missing or damaged."""
        try:
            return self.manifest(key)
        except StoreError:
            return None

    def layer(self, manifest: ChunkManifest, layer: int) -> dict[str, memoryview]:
        """Return a layer's tensors by name, as bytes. Raises BadBlob if it is missing, damaged or of wrong shape."""
        self._blob_node(manifest, layer)  # check the size before allocating memory
        spec = records.layer_spec(manifest, layer)
        parts = {name: memoryview(bytearray(tensor.num_bytes)) for name, tensor in spec.items()}
        self.copy_layer(manifest, layer, parts)
        return parts

    def state_of(self, manifest: ChunkManifest) -> list[memoryview]:
        """Return the data of each tensor of the chunk's state. Raises BadBlob like `layer`."""
        return list(self.layer(manifest, manifest.num_layers).values())

    def copy_layer(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview]) -> None:
        """Copy the tensors of a layer's blob to `targets`, buffers of exactly their sizes. Raises BadBlob like `layer`.
        The digest is computed over the copy, with one read and one digest update per tensor, without the GIL."""
        spec = records.layer_spec(manifest, layer)
        with self._look_up:
            node = self._blob_node(manifest, layer)
        prefix = blob_prefix(spec)
        parts = [memoryview(bytearray(len(prefix))), *(targets[name].cast("B") for name in spec)]
        self.pages.read_into(node, parts)
        if parts[0] != prefix:
            raise bad_blob(manifest, layer, "has a header that does not match its tensors")
        digest = records.blob_hasher(manifest.key, layer, manifest.num_tokens)
        for part in parts:
            digest.update(part)
        if digest.digest() != manifest.blob_digests[layer]:
            raise bad_blob(manifest, layer, "does not match its digest")

    def locate(self, reads: LayerReads) -> None:
        """Look up where the layers are, so that `read_layers` reads and checks a group of them in one compiled call.

        Handing over the GIL takes threads that read at once longer than the reads. Does nothing if a layer is missing,
        or not of the expected size.
        """
        manifest, layers = reads.manifest, [layer for group in reads.groups for layer in group]
        spec = records.layer_spec(manifest, layers[0])
        size, prefix, keys = blob_size(spec), blob_prefix(spec), [blob_key(manifest.key, n) for n in layers]
        with self._look_up:
            placed = self.pages.place("blobs", keys, size)
        if placed is None or any(manifest.blob_sizes[n] != size for n in layers):
            return
        values = iter(
            Value(offset, header + prefix, records.blob_seed(key, manifest.num_tokens), manifest.blob_digests[n])
            for (offset, header), key, n in zip(placed, keys, layers, strict=True)
        )
        groups = [list(islice(values, len(group))) for group in reads.groups]
        reads.compiled = CompiledReads(groups, [[own[name] for name in spec] for own in reads.places])

    def read_layers(self, reads: LayerReads, group: int, buffer: memoryview) -> None:
        """Copy a group of layers to its places in the buffer, and check the copy. Raises what `copy_layer` raises.

        Layers that were located in an earlier snapshot, and are elsewhere by now, fail the check and are looked up
        again. Several threads may call it at once.
        """
        compiled = reads.compiled
        if compiled is not None and compiled.read(self.pages.handle, group, buffer):
            return
        for layer, own in zip(reads.groups[group], reads.places, strict=False):
            self.copy_layer(reads.manifest, layer, {name: buffer[a:b] for name, (a, b) in own.items()})
        reads.compiled = None

    def blob(self, manifest: ChunkManifest, layer: int) -> bytes:
        """Return a layer's blob in its stored encoding. Raises BadBlob like `layer`."""
        return encode_blob(records.layer_spec(manifest, layer), self.layer(manifest, layer))

    def _blob_node(self, manifest: ChunkManifest, layer: int) -> Node:
        if not manifest.has_kv:
            raise bad_blob(manifest, layer, "is missing: the chunk has no KV now")
        node = self.pages.get("blobs", blob_key(manifest.key, layer))
        if node is None:
            raise bad_blob(manifest, layer, "is missing")
        wanted = blob_size(records.layer_spec(manifest, layer))
        if node.size != wanted or manifest.blob_sizes[layer] != wanted:
            raise bad_blob(manifest, layer, f"has {node.size} bytes instead of {wanted}")
        return node

    def get(self, database: str, key: bytes) -> memoryview | None:
        """Return a value, or None. Raises StoreCorrupt if a page on the path to it is damaged."""
        node = self.pages.get(database, key)
        return None if node is None else self.pages.value(node)

    def keys_from(self, start: bytes, database: str = "chunks") -> Iterator[bytes]:
        """Yield the keys of a database in order, starting at `start`."""
        for node in self.pages.nodes(database, start):
            yield node.key

    def keys_with(self, prefix: bytes, database: str) -> Iterator[bytes]:
        """Yield the keys of a database that begin with `prefix`, in order."""
        return takewhile(lambda key: key.startswith(prefix), self.keys_from(prefix, database))

    def document(self, key: bytes) -> DocumentRecord | None:
        """Return a document record, or None if it is missing or damaged."""
        return records.undamaged(records.decode_document, key, self.get("documents", key))

    def documents(self) -> Iterator[DocumentRecord]:
        """Yield all undamaged document records."""
        return filter(None, map(self.document, self.keys_from(b"", "documents")))

    def documents_of(self, key: bytes) -> Iterator[bytes]:
        """Yield the keys of the document records that refer to a chunk."""
        for name in self.keys_with(key, "refs"):
            yield name[KEY_BYTES:]

    def summaries(self) -> Iterator[DocumentSummary]:
        """Yield the valid document summaries (see format/summaries.py) in the order of `documents`."""
        if stamped(self.get) != self.pages.meta.txnid:
            return
        for node in self.pages.nodes("meta", SUMMARY_KEYS, skip_damaged=True):
            if not node.key.startswith(SUMMARY_KEYS):
                return
            with suppress(BadBlob, StoreCorrupt):
                self.pages.check_extent(node)
                yield decode_summary(node.key, self.pages.value(node))

    def summary(self, document: bytes) -> DocumentSummary | None:
        """Return the summary of a document record, or None if it is missing, damaged or invalid."""
        key = SUMMARY_KEYS + document
        with suppress(StoreError):
            value = self.get("meta", key)
            if value is not None and stamped(self.get) == self.pages.meta.txnid:
                return decode_summary(key, value)
        return None

    def is_sound(self, database: str, key: bytes) -> bool:
        """Return whether a record exists and matches its digest. The record is not decoded."""
        with suppress(StoreError):
            value = self.get(database, key)
            return value is not None and bool(records.unseal(key, value))
        return False

    def memo(self, key: bytes) -> Memo | None:
        """Return a memo, or None if it is missing, damaged or of an unknown version."""
        return records.undamaged(records.decode_memo, key, self.get("meta", key))

    def memos(self) -> Iterator[Memo]:
        return filter(None, map(self.memo, self.keys_with(records.MEMO_KEYS, "meta")))

    def state(self) -> State:
        return read_state(self.get, self.pages)

    def changes_since(self, generation: int) -> Changes | None:
        """Return the changes since a generation of the store, None if the change log does not cover all of them."""
        return changes_between(self.get("meta", LOG), generation, self.state().generation)

    def entries(self, database: str) -> int:
        tree = self.pages.tree(database)
        return tree.entries if tree else 0


def bad_blob(manifest: ChunkManifest, layer: int, reason: str) -> BadBlob:
    return BadBlob(f"layer {layer} of chunk {manifest.id[:12]} {reason}", layer=layer)
