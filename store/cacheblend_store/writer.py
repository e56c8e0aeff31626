"""Writing: what happens inside one write transaction. The counters change with the records, in the same commit."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cacheblend_store.errors import BadBlob, StoreFull
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import (
    ChunkManifest,
    DocumentRecord,
    blob_digest,
    decode_document,
    decode_manifest,
    encode_document,
    encode_manifest,
    use_record,
    used_at,
)
from cacheblend_store.lmdb_file.pages.reader import PageReader
from cacheblend_store.state import count_live_bytes, read_state, write_state

PutStatus = Literal["new", "unchanged", "replaced"]
Blob = bytes | bytearray | memoryview


class StoreWriter:
    """One write transaction. `finish` before it is committed. Pages are checked as they were when it began."""

    def __init__(self, transaction: Any, dbs: Mapping[str, Any], pages: PageReader) -> None:
        self._txn, self._dbs, self._pages = transaction, dbs, pages
        self.state = self._before = read_state(self.get, pages)
        self._own = set[tuple[str, bytes]]()  # what this transaction put

    def finish(self) -> None:
        """Write the counters when they changed."""
        if self.state != self._before:
            self._check("meta", b"state")
            write_state(self._txn, self._dbs, self.state)

    def set_max_bytes(self, max_bytes: int) -> None:
        self.state = replace(self.state, max_bytes=max_bytes)

    def changed(self) -> None:
        """Something was added or removed: the generation rises, to one that no other copy of the store has had."""
        self.state = replace(self.state, generation=max(self._before.generation + 1, time.time_ns()))

    def get(self, database: str, key: bytes) -> bytes | None:
        """A copy of a value."""
        self._pages.get(database, key)  # checked, whatever this transaction has put there since
        value = self._txn.get(key, db=self._dbs[database])
        return None if value is None else bytes(value)

    def put(self, database: str, key: bytes, value: Blob) -> None:
        self._check(database, key)
        own = database, key
        if own in self._own:  # put over, it would keep its pages, even where there are too many of them then
            self.delete(database, key)
        self._txn.put(key, value, db=self._dbs[database])
        self._own.add(own)

    def delete(self, database: str, key: bytes) -> bool:
        """Whether it was there."""
        self._check(database, key)
        if self._txn.get(key, db=self._dbs[database]) is None:
            return False
        self._pages.check_beside(database, key)
        return bool(self._txn.delete(key, db=self._dbs[database]))

    def _check(self, database: str, key: bytes) -> None:
        """The pages that LMDB will walk to a record, and those of its old value, which writing frees."""
        self._pages.get(database, key)

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """None when there is none or it is damaged."""
        value = self.get("chunks", key)
        try:
            return None if value is None else decode_manifest(key, value)
        except BadBlob:
            return None

    # chunks

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[Blob]) -> PutStatus:
        """Sizes and digests are filled in here."""
        whole, old = with_digests(manifest, blobs), self._same(manifest)
        if old is not None and old.has_kv and self._holds(whole):
            return "unchanged"
        existed = self._remove(manifest.key)
        for layer, blob in enumerate(blobs):
            self.put("blobs", blob_key(manifest.key, layer), blob)
        self._count(whole.num_bytes)
        self.put("chunks", manifest.key, encode_manifest(whole))
        self.put("lru", manifest.key, use_record(manifest.key, time.time()))
        if old is not None and not old.has_kv:
            return "new"  # for those who wait for KV, and nothing for those who list chunks
        self.changed()
        return "replaced" if existed else "new"

    def put_record(self, manifest: ChunkManifest) -> bool:
        """Store a chunk without KV unless it is there, with KV or without; whether it was not."""
        if self._same(manifest) is not None:
            return False
        self._remove(manifest.key)
        self.put("chunks", manifest.key, encode_manifest(manifest.without_kv()))
        self.changed()
        return True

    def delete_chunk(self, key: bytes) -> bool:
        """Remove record, blobs and last use of a chunk, whatever state they are in; whether there was any."""
        existed = self._remove(key)
        if existed:
            self.changed()
        return existed

    def evict(self, key: bytes) -> bool:
        """Remove a chunk's KV and keep its record; whether there was KV. A chunk whose record does not read goes whole."""
        manifest = self.manifest(key)
        if manifest is None:
            return self.delete_chunk(key)
        existed = self._delete_blobs(key)
        if manifest.has_kv:
            self.put("chunks", key, encode_manifest(manifest.without_kv()))
        self.delete("lru", key)
        return existed or manifest.has_kv

    def _same(self, manifest: ChunkManifest) -> ChunkManifest | None:
        """The record that is there, when it is of the same tokens."""
        old = self.manifest(manifest.key)
        return old if old is not None and old.token_ids == manifest.token_ids else None

    def _remove(self, key: bytes) -> bool:
        existed = self._delete_blobs(key)
        existed = self.delete("chunks", key) or existed
        self.delete("lru", key)
        return existed

    def _delete_blobs(self, key: bytes) -> bool:
        """Remove all blobs of a chunk; whether there was any."""
        for node in self._pages.nodes("blobs", key):  # the pages that the cursor will walk
            if not node.key.startswith(key):
                break
        cursor, there = self._txn.cursor(db=self._dbs["blobs"]), []
        more = cursor.set_range(key)
        while more and (name := bytes(cursor.key())).startswith(key):
            there.append((name, len(cursor.value())))
            more = cursor.next()
        for name, size in there:  # not by the cursor: py-lmdb's delete ends in a SystemError when the page after is bad
            self.delete("blobs", name)
            self._count(-size)
        return bool(there)

    def _count(self, num_bytes: int) -> None:
        self.state = replace(self.state, live_bytes=self.state.live_bytes + num_bytes)

    def _holds(self, manifest: ChunkManifest) -> bool:
        """Whether the blobs on disk are these: a record whose digests match can stand over a damaged blob."""
        for layer, digest in enumerate(manifest.blob_digests):
            key = blob_key(manifest.key, layer)
            self._pages.get("blobs", key)
            blob = self._txn.get(key, db=self._dbs["blobs"])
            if blob is None or blob_digest(manifest.key, layer, manifest.num_tokens, blob) != digest:
                return False
        return True

    def make_room(self, num_bytes: int, keep: Collection[bytes]) -> None:
        """Evict least recently used chunks, but none of `keep`, until num_bytes more fit the quota. Raises StoreFull."""
        limit = self.state.max_bytes
        if not limit or self.state.live_bytes + num_bytes <= limit:
            return
        for key in self._by_last_use():
            if key not in keep:
                self.evict(key)
                if self.state.live_bytes + num_bytes <= limit:
                    return
        raise StoreFull(
            f"the store's quota is {limit:,} bytes of KV, and {self.state.live_bytes + num_bytes:,} are needed",
            "raise --max-size",
        )

    def _by_last_use(self) -> Iterator[bytes]:
        """Keys of all chunks that can have KV, those unused for longest first; then those of which no use is noted."""
        used = {node.key: used_at(node.key, node.inline) for node in self._pages.nodes("lru")}
        yield from sorted(used, key=lambda key: (used[key], key))
        yield from (node.key for node in self._pages.nodes("chunks") if node.key not in used)

    def touch(self, uses: Mapping[bytes, float]) -> None:
        """Record last uses (seconds since the epoch) of chunks that have KV, unless a later one is known."""
        for key, moment in uses.items():
            manifest = self.manifest(key)
            if manifest is not None and manifest.has_kv and moment > used_at(key, self.get("lru", key) or b""):
                self.put("lru", key, use_record(key, moment))

    # documents

    def put_documents(self, records: Sequence[DocumentRecord], removed: Collection[bytes] = ()) -> list[bytes]:
        """Replace the records, and remove those whose keys are in `removed`; the chunks that went with the old ones. A chunk
        that moved from one of these documents to another stays."""
        dropped = list[bytes]()
        for record in records:
            key = record.key
            dropped += self._unrefer(key, keep={c.key for c in record.chunks})
            self.put("documents", key, encode_document(record))
            for chunk in record.chunks:
                self.put("refs", chunk.key + key, b"")
            self.changed()
        for key in removed:
            dropped += self._unrefer(key, keep=set())
            if self.delete("documents", key):
                self.changed()
        return [key for key in dropped if not self.is_referred(key) and self.delete_chunk(key)]

    def _unrefer(self, document: bytes, keep: set[bytes]) -> list[bytes]:
        """Drop a document's references; the chunks that no other document refers to and `keep` does not name."""
        value = self.get("documents", document)
        if value is None:
            return []
        try:
            old = {c.key for c in decode_document(document, value).chunks}
        except BadBlob:
            return []
        orphans = []
        for key in sorted(old):
            self.delete("refs", key + document)
            if key not in keep and not self.is_referred(key):
                orphans.append(key)
        return orphans

    def is_referred(self, key: bytes) -> bool:
        """Whether a document refers to the chunk."""
        self._pages.check_beside("refs", key)  # a cursor goes on to the next leaf
        self._pages.check_beside("refs", key + b"\xff" * 16)
        cursor = self._txn.cursor(db=self._dbs["refs"])
        return bool(cursor.set_range(key)) and bytes(cursor.key()[:KEY_BYTES]) == key

    def rebuild_references(self) -> None:
        """The references from the document records, as they are in this transaction; damaged records give none."""
        wanted = set()
        for name, value in self._txn.cursor(db=self._dbs["documents"]):
            try:
                wanted |= {c.key + bytes(name) for c in decode_document(bytes(name), value).chunks}
            except BadBlob:
                continue
        there = {bytes(name) for name in self._txn.cursor(db=self._dbs["refs"]).iternext(values=False)}
        for name in there - wanted:
            self.delete("refs", name)
        for name in wanted - there:
            self.put("refs", name, b"")

    def recount(self) -> None:
        """The byte counter from the blobs, as they were when this transaction began."""
        self.state = replace(self.state, live_bytes=count_live_bytes(self._pages))


def with_digests(manifest: ChunkManifest, blobs: Sequence[Blob]) -> ChunkManifest:
    """The manifest with sizes and digests of its blobs."""
    assert len(blobs) == manifest.num_layers
    digests = tuple(blob_digest(manifest.key, i, manifest.num_tokens, blob) for i, blob in enumerate(blobs))
    return replace(manifest, blob_sizes=tuple(memoryview(blob).nbytes for blob in blobs), blob_digests=digests)
