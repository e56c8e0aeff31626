"""Write transactions. Counters and the records they count change in the same commit."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

from cacheblend_store.errors import StoreFull
from cacheblend_store.format import records
from cacheblend_store.format.changes import LOG, Changes, append
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import Blob, ChunkManifest, DocumentRecord
from cacheblend_store.format.records import with_digests as with_digests
from cacheblend_store.format.summaries import STAMP, SUMMARY_KEYS, DocumentSummary, encode_summary, stamp, stamped
from cacheblend_store.lmdb_file.pages.reader import PageReader
from cacheblend_store.state import COUNTED, count_bytes, read_state, write_state

PutStatus = Literal["new", "unchanged", "replaced", "gone"]
"""Of a chunk; "gone": it is not stored, because its record was removed."""


class StoreWriter:
    """One write transaction; call `finish` before the commit. Page checks cover the commit it started from."""

    def __init__(self, transaction: Any, dbs: Mapping[str, Any], pages: PageReader) -> None:
        self._txn, self._dbs, self._pages = transaction, dbs, pages
        self._checked = set[tuple[str, bytes]]()
        self.state = self._before = read_state(self.get, pages)
        self._num_bytes = {name: getattr(self.state, field) for name, field in COUNTED.items()}
        self._own = set[tuple[str, bytes]]()  # records written in this transaction
        self._changes: Changes | None = Changes(set(), set())  # None: incomplete
        self._wrote = False
        self._has_summaries = any(self._summary_keys())
        # the last writer was a version that does not drop stale ones
        if self._has_summaries and stamped(self.get) != pages.meta.txnid:
            for name in list(self._summary_keys()):
                self.delete("meta", name)

    def finish(self) -> None:
        """Write the counters and the change log if they changed."""
        before, after = self._before.generation, self.state.generation
        if after != before and self._changes is not None:
            self.put("meta", LOG, append(self.get("meta", LOG), before, after, self._changes))
        self.state = replace(self.state, **{field: self._num_bytes[name] for name, field in COUNTED.items()})
        if self.state != self._before:
            self._check("meta", b"state")
            write_state(self._txn, self._dbs, self.state)
            self._wrote = True
        if self._wrote and self._has_summaries:
            self.put("meta", STAMP, stamp(self._txn.id()))

    @property
    def used_bytes(self) -> int:
        """Bytes of blobs, chunk records and document records, which count against the quota."""
        return sum(self._num_bytes.values())

    def changed(self, *, chunk: bytes | None = None, document: bytes | None = None) -> None:
        """Increase the generation after a chunk or document record was added, removed or replaced. Without a key the
        change log gets a gap, and its readers must compare everything."""
        if chunk is None and document is None:
            self._changes = None
        elif self._changes is not None:
            self._changes.chunks.update(filter(None, (chunk,)))
            self._changes.documents.update(filter(None, (document,)))
        self.state = replace(self.state, generation=max(self._before.generation + 1, time.time_ns()))

    def get(self, database: str, key: bytes) -> bytes | None:
        self._check(database, key)
        value = self._txn.get(key, db=self._dbs[database])
        return None if value is None else bytes(value)

    def put(self, database: str, key: bytes, value: Blob) -> None:
        self._check(database, key)
        own, self._wrote = (database, key), True
        if database == "documents":
            self._drop_summary(key)
        if own in self._own:  # LMDB would keep all pages of the old value, even if the new one needs fewer
            self.delete(database, key)
        elif database in self._num_bytes:
            self._num_bytes[database] -= len(self._txn.get(key, b"", db=self._dbs[database]))
        self._txn.put(key, value, db=self._dbs[database])
        self._own.add(own)
        if database in self._num_bytes:
            self._num_bytes[database] += memoryview(value).nbytes

    def delete(self, database: str, key: bytes) -> bool:
        """Delete a record. Return whether it existed."""
        self._check(database, key)
        old = self._txn.get(key, db=self._dbs[database])
        if old is None:
            return False
        if database in self._num_bytes:
            self._num_bytes[database] -= len(old)
        if database == "documents":
            self._drop_summary(key)
        self._wrote = True
        self._pages.check_beside(database, key)
        return bool(self._txn.delete(key, db=self._dbs[database]))

    def _check(self, database: str, key: bytes) -> None:
        """Check the pages on LMDB's path to a record, and the pages of its old value, which a write frees."""
        record = database, key
        if record not in self._checked:
            self._pages.get(database, key)
            self._checked.add(record)

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest of a chunk, or None if it is missing or damaged."""
        return records.undamaged(records.decode_manifest, key, self.get("chunks", key))

    def document(self, key: bytes) -> DocumentRecord | None:
        """Return a document record, or None if it is missing or damaged."""
        return records.undamaged(records.decode_document, key, self.get("documents", key))

    # chunks

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[Blob], used_s: float) -> PutStatus:
        """Store a chunk: the manifest, with sizes and digests, and one blob per layer. used_s: time of last use,
        seconds since the epoch. The earliest is evicted first."""
        record, old = self.get("chunks", manifest.key), self.manifest(manifest.key)
        same = old if old is not None and old.token_ids == manifest.token_ids else None
        if same is not None and same.has_kv and self._holds(manifest):
            return "unchanged"
        for layer, blob in enumerate(blobs):  # overwrites all old blobs, because a key implies the number of layers
            self.put("blobs", blob_key(manifest.key, layer), blob)
        self.put("chunks", manifest.key, records.encode_manifest(manifest))
        self.put("lru", manifest.key, records.use_record(manifest.key, used_s))
        if same is not None and not same.has_kv:
            return "new"  # the set of chunks is unchanged: no new generation
        self.changed(chunk=manifest.key)
        return "replaced" if record is not None else "new"

    def put_record(self, manifest: ChunkManifest, *, owned: bool = False) -> bool:
        """Store a chunk without KV if it is missing. Return whether it was missing. owned: a document refers to the
        chunk. Otherwise it is recorded as used now, so that `make_room` can remove it later."""
        old = self.manifest(manifest.key)
        if old is not None and old.token_ids == manifest.token_ids:
            return False
        if self.get("chunks", manifest.key) is not None:  # damaged
            self._delete_blobs(manifest.key)
            self._drop_summaries_with(manifest.key)
        self.put("chunks", manifest.key, records.encode_manifest(manifest.without_kv()))
        if not owned:
            self.put("lru", manifest.key, records.use_record(manifest.key, time.time()))
        self.changed(chunk=manifest.key)
        return True

    def delete_chunk(self, key: bytes) -> bool:
        """Remove a chunk's record, blobs and last use, even if damaged. Return whether there was one."""
        existed = self._delete_blobs(key)
        existed = self.delete("chunks", key) or existed
        self.delete("lru", key)
        if existed:
            self._drop_summaries_with(key)
            self.changed(chunk=key)
        return existed

    def evict(self, key: bytes) -> bool:
        """Remove a chunk's KV and keep its record, unless the record is damaged. Return whether there was KV."""
        manifest = self.manifest(key)
        if manifest is None:
            return self.delete_chunk(key)
        existed = self._delete_blobs(key)
        if manifest.has_kv:
            self.put("chunks", key, records.encode_manifest(manifest.without_kv()))
        self.delete("lru", key)
        self._drop_summaries_with(key)
        return existed or manifest.has_kv

    def _delete_blobs(self, key: bytes) -> bool:
        """Remove all blobs of a chunk. Return whether there were any."""
        found = self._keys_with("blobs", key)
        for name in found:  # do not delete by cursor: py-lmdb raises SystemError if the next page is damaged
            self.delete("blobs", name)
        return bool(found)

    def _keys_with(self, database: str, prefix: bytes) -> list[bytes]:
        """Return the keys that begin with `prefix`, those of this transaction included."""
        for node in self._pages.nodes(database, prefix):  # check the pages that the cursor walks
            if not node.key.startswith(prefix):
                break
        cursor, found = self._txn.cursor(db=self._dbs[database]), list[bytes]()
        more = cursor.set_range(prefix)
        while more and (name := bytes(cursor.key())).startswith(prefix):
            found.append(name)
            more = cursor.next()
        return found

    def _holds(self, manifest: ChunkManifest) -> bool:
        """Return whether the stored blobs match these digests. A valid record can belong to a damaged blob."""
        for layer, digest in enumerate(manifest.blob_digests):
            key = blob_key(manifest.key, layer)
            self._pages.get("blobs", key)
            blob = self._txn.get(key, db=self._dbs["blobs"])
            if blob is None or records.blob_digest(manifest.key, layer, manifest.num_tokens, blob) != digest:
                return False
        return True

    def make_room(self, num_bytes: int, *keep: Container[bytes], most: int | None = None) -> bool:
        """Free space until num_bytes more fit the quota, least recently used chunks first. Raises StoreFull. A chunk of
        a document loses only its KV; a chunk without a document is removed.

        keep: keys of chunks to leave alone. most: stop after this many chunks. Return whether num_bytes fit.
        """
        limit = self.state.max_bytes
        if not limit or self.used_bytes + num_bytes <= limit:
            return True
        free = (key for key in self._by_last_use() if not any(key in keys for keys in keep))
        for count, key in enumerate(free, 1):
            if self._stays_as_text(key):
                self.evict(key)
            else:
                self.delete_chunk(key)
            if self.used_bytes + num_bytes <= limit:
                return True
            if count == most:
                return False
        raise StoreFull(
            f"the store's quota is {limit:,} bytes of KV and text; {self.used_bytes + num_bytes:,} are needed",
            "raise --max-size",
        )

    def size_of(self, key: bytes) -> int:
        """Return the bytes of a chunk that count against the quota, 0 if it is not stored."""
        manifest = self.manifest(key)
        return 0 if manifest is None else manifest.num_bytes + len(self.get("chunks", key) or b"")

    def _stays_as_text(self, key: bytes) -> bool:
        """Return whether a chunk without KV is still listed: a document refers to it, or it is a prompt's prefix."""
        if self.is_referred(key):
            return True
        manifest = self.manifest(key)
        return manifest is not None and manifest.context == "prefix"

    def _by_last_use(self) -> Iterator[bytes]:
        """Yield keys of chunks to free: least recently used first, then chunks with KV but no recorded use."""
        used = {node.key: records.used_at(node.key, node.inline) for node in self._pages.nodes("lru")}
        yield from sorted(used, key=lambda key: (used[key], key))
        yield from sorted({node.key[:KEY_BYTES] for node in self._pages.nodes("blobs")} - used.keys())

    def touch(self, uses: Mapping[bytes, float]) -> None:
        """Record last uses (seconds since the epoch) of chunks with KV. A later recorded use stays."""
        for key, moment in uses.items():
            manifest = self.manifest(key)
            if manifest is not None and manifest.has_kv and moment > records.used_at(key, self.get("lru", key) or b""):
                self.put("lru", key, records.use_record(key, moment))

    # documents

    def put_documents(self, documents: Sequence[DocumentRecord], removed: Collection[bytes] = ()) -> list[bytes]:
        """Store document records and remove those in `removed`. Return the keys of the chunks that were removed with
        them. A chunk that moved from one of these documents to another stays."""
        dropped, refs = list[bytes](), set[bytes]()
        for record in documents:
            key = record.key
            dropped += self._unrefer(key, keep={c.key for c in record.chunks})
            self.put("documents", key, records.encode_document(record))
            refs |= {chunk.key + key for chunk in record.chunks}
            self.changed(document=key)
        for name in sorted(refs):  # adjacent keys share pages, which are then checked once
            self.put("refs", name, b"")
        for key in removed:
            dropped += self._unrefer(key, keep=set())
            if self.delete("documents", key):
                self.changed(document=key)
        return [key for key in dropped if not self.is_referred(key) and self.delete_chunk(key)]

    def _unrefer(self, document: bytes, keep: set[bytes]) -> list[bytes]:
        """Remove a document's references. Return chunks that no other document refers to, except for `keep`."""
        record, orphans = self.document(document), list[bytes]()
        for key in sorted({c.key for c in record.chunks} if record else ()):
            self.delete("refs", key + document)
            if key not in keep and not self.is_referred(key):
                orphans.append(key)
        return orphans

    def is_referred(self, key: bytes) -> bool:
        self._pages.check_beside("refs", key)  # the cursor can move on to the next leaf
        self._pages.check_beside("refs", key + b"\xff" * 16)
        cursor = self._txn.cursor(db=self._dbs["refs"])
        return bool(cursor.set_range(key)) and bytes(cursor.key()[:KEY_BYTES]) == key

    def put_summary(self, summary: DocumentSummary) -> bool:
        """Store a summary if it matches the stored document and all chunks have KV. Return whether it was stored."""
        record = self.document(summary.document)
        if record is None or (record.content_digest, record.settings) != (summary.content_digest, summary.settings):
            return False
        if summary.keys != b"".join(chunk.key for chunk in record.chunks):
            return False
        for key in sorted({chunk.key for chunk in record.chunks}):  # in storage order
            found = self.get("chunks", key)
            if found is None or not records.has_blobs(key, found):
                return False
        self._has_summaries = True
        self.put("meta", SUMMARY_KEYS + summary.document, encode_summary(replace(summary, updated=record.updated)))
        return True

    def _summary_keys(self) -> Iterator[bytes]:
        """Return the keys of the summaries in the commit that the transaction started from."""
        names = (node.key for node in self._pages.nodes("meta", SUMMARY_KEYS))
        return takewhile(lambda name: name.startswith(SUMMARY_KEYS), names)

    def _drop_summary(self, document: bytes) -> None:
        if self._has_summaries:
            self.delete("meta", SUMMARY_KEYS + document)

    def _drop_summaries_with(self, key: bytes) -> None:
        """Drop the summaries of the documents that refer to a chunk."""
        if self._has_summaries:
            self._pages.check_beside("refs", key)
            for name in self._keys_with("refs", key):
                self._drop_summary(name[KEY_BYTES:])

    def rebuild_references(self) -> None:
        """Rebuild the references from the document records of this transaction. Damaged records are skipped."""
        wanted = set()
        for name, value in self._txn.cursor(db=self._dbs["documents"]):
            document = records.undamaged(records.decode_document, bytes(name), value)
            wanted |= {c.key + bytes(name) for c in document.chunks} if document else set()
        there = {bytes(name) for name in self._txn.cursor(db=self._dbs["refs"]).iternext(values=False)}
        for name in there - wanted:
            self.delete("refs", name)
        for name in wanted - there:
            self.put("refs", name, b"")

    def recount(self) -> None:
        """Recount the bytes of blobs and records at the commit that this transaction started from."""
        self._num_bytes = {database: count_bytes(self._pages, database) for database in self._num_bytes}
