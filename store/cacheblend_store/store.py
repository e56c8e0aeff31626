"""The store: chunks and documents in one LMDB environment, one transaction a chunk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import lmdb

from cacheblend_store.blob import parse_blob
from cacheblend_store.environment import (
    DATABASES,
    check_space,
    close_environment,
    open_environment,
    writer_lock,
)
from cacheblend_store.errors import (
    AmbiguousId,
    BadBlob,
    ChunkNotFound,
    StoreCorrupt,
    StoreError,
    StoreFormat,
    StoreFull,
    StoreIOError,
    StoreNoSpace,
    StorePermission,
)
from cacheblend_store.keys import FORMAT_VERSION, KEY_BYTES
from cacheblend_store.layouts import blob_spec
from cacheblend_store.records import (
    ChunkManifest,
    DocumentRecord,
    blob_digest,
    decode_document,
    decode_manifest,
    document_key,
    encode_document,
    encode_manifest,
)

PutStatus = Literal["new", "unchanged", "replaced"]


class ChunkStore:
    """Chunk KV on disk. Every method is its own short transaction; what `put_chunk` returned from is durable.

    Use as a context manager. Opening twice in a process shares the environment; a forked child reopens it by itself.
    """

    def __init__(self, path: Path, write: bool, create: bool, lock_timeout: float, force: bool) -> None:
        self.path, self._write, self._lock_timeout, self._force = path, write, lock_timeout, force
        self._connect(create)
        try:
            with _translated(path):
                self.identity = self._identify()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: Literal["read", "write"] = "read",
        create: bool | None = None,
        lock_timeout: float = 30.0,
        force: bool = False,
    ) -> ChunkStore:
        """Open a store. `create` defaults to mode == "write". Raises a StoreError that says what to do."""
        write = mode == "write"
        return cls(Path(path), write, write if create is None else create, lock_timeout, force)

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        close_environment(self._env)

    @property
    def writable(self) -> bool:
        return self._write

    # reading

    @contextmanager
    def read(self) -> Iterator[StoreReader]:
        """One read transaction. The reader belongs to the thread that opened it; views it gives end with it."""
        with _translated(self.path), self._environment().begin(buffers=True) as transaction:
            yield StoreReader(transaction, self._dbs)

    def get_chunk(self, key: bytes) -> ChunkManifest | None:
        """The manifest, None when the chunk is not there. Raises BadBlob when its record is damaged."""
        with self.read() as reader:
            return reader.manifest(key)

    def resolve(self, prefix: str) -> bytes:
        """The key whose hex id begins with `prefix`. Raises ChunkNotFound, AmbiguousId."""
        text = prefix.strip().lower()
        if not text or len(text) > 2 * KEY_BYTES or any(c not in "0123456789abcdef" for c in text):
            raise ChunkNotFound(f"{prefix!r} is no chunk id", "ids are hex; list them: cacheblend chunks ls")
        low = bytes.fromhex(text.ljust(2 * KEY_BYTES, "0"))
        found: list[str] = []
        with self.read() as reader:
            for key in reader.keys_from(low):
                if not key.hex().startswith(text) or len(found) == 4:
                    break
                found.append(key.hex())
        if not found:
            raise ChunkNotFound(f"no chunk has an id that begins with {prefix}", "list the ids: cacheblend chunks ls")
        if len(found) > 1:
            raise AmbiguousId(
                f"{prefix} begins more than one chunk id: {', '.join(i[: len(text) + 6] for i in found)}",
                "write more digits of the one you mean",
            )
        return bytes.fromhex(found[0])

    def chunks(self, *, collection: str | None = None, prefixes: bool = False) -> Iterator[ChunkManifest]:
        """All chunks in key order, in short transactions. Damaged records are passed over (`damaged_keys` lists them)."""
        start = b""
        while True:
            page: list[ChunkManifest] = []
            with self.read() as reader:
                keys = []
                for key in reader.keys_from(start):
                    keys.append(key)
                    if len(keys) == 256:
                        break
                for key in keys:
                    try:
                        manifest = reader.manifest(key)
                    except BadBlob:
                        continue
                    if manifest and (collection in (None, manifest.collection)):
                        page.append(manifest)
            yield from (m for m in page if prefixes or m.context != "prefix")
            if len(keys) < 256:
                return
            start = keys[-1] + b"\0"

    def damaged_keys(self) -> list[bytes]:
        """Keys whose manifest does not read."""
        bad = []
        with self.read() as reader:
            for key in reader.keys_from(b""):
                try:
                    reader.manifest(key)
                except BadBlob:
                    bad.append(key)
        return bad

    def get_document(self, collection: str, source: str) -> DocumentRecord | None:
        """The record; None when there is none or it is damaged (the document is then precomputed again)."""
        key = document_key(collection, source)
        with self.read() as reader:
            return reader.document(key)

    def documents(self, collection: str | None = None) -> list[DocumentRecord]:
        """All document records, of one collection or of all, by source."""
        with self.read() as reader:
            found = list(reader.documents())
        return sorted((d for d in found if collection in (None, d.collection)), key=lambda d: (d.source, d.collection))

    @property
    def generation(self) -> int:
        """Rises with every commit that adds or removes chunks or documents."""
        with self.read() as reader:
            return reader.counter(b"generation")

    def stats(self) -> dict[str, int]:
        """chunks, documents, live_bytes (blobs), file_bytes, free_bytes (pages LMDB will reuse)."""
        with self.read() as reader:
            env = self._environment()
            info, page = env.info(), env.stat()["psize"]
            used = sum(
                (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) * page for s in reader.database_stats()
            )
            return {
                "chunks": reader.entries("chunks"),
                "documents": reader.entries("documents"),
                "live_bytes": reader.counter(b"live_bytes"),
                "file_bytes": (self.path / "data.mdb").stat().st_size,
                "free_bytes": max(0, (info["last_pgno"] + 1) * page - used),
            }

    # writing

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[bytes]) -> PutStatus:
        """Store a chunk whole: manifest and one blob a layer, in one transaction, durable on return.

        Sizes and digests are filled in here. Raises StoreNoSpace, StoreFull, StoreLocked, StoreIOError.
        """
        manifest = replace(
            manifest,
            blob_sizes=tuple(len(b) for b in blobs),
            blob_digests=tuple(blob_digest(manifest.key, i, manifest.num_tokens, b) for i, b in enumerate(blobs)),
        )
        assert len(blobs) == manifest.num_layers
        check_space(self.path, manifest.num_bytes)
        with self._writing() as (txn, dbs):
            old = self._manifest_in(txn, dbs, manifest.key)
            if old and old.token_ids == manifest.token_ids and self._holds(txn, dbs, manifest.key, blobs):
                return "unchanged"
            existed = self._delete(txn, dbs, manifest.key)
            for layer, blob in enumerate(blobs):
                txn.put(manifest.key + layer.to_bytes(4, "big"), blob, db=dbs["blobs"])
            txn.put(manifest.key, encode_manifest(manifest), db=dbs["chunks"])
            self._count(txn, dbs, b"live_bytes", manifest.num_bytes)
            self._count(txn, dbs, b"generation", 1)
            return "replaced" if existed else "new"

    def put_document(self, record: DocumentRecord) -> list[bytes]:
        """Replace the record of (collection, source). Chunks no document refers to any more go; returns their keys."""
        key = document_key(record.collection, record.source)
        with self._writing() as (txn, dbs):
            orphans = self._unref(txn, dbs, key, keep={c.key for c in record.chunks})
            txn.put(key, encode_document(record), db=dbs["documents"])
            for chunk in record.chunks:
                txn.put(chunk.key + key, b"", db=dbs["refs"])
            for orphan in orphans:
                self._delete(txn, dbs, orphan)
            self._count(txn, dbs, b"generation", 1)
        return orphans

    def remove_document(self, collection: str, source: str) -> list[bytes]:
        """Forget a document and the chunks only it refers to; returns their keys."""
        key = document_key(collection, source)
        with self._writing() as (txn, dbs):
            orphans = self._unref(txn, dbs, key, keep=set())
            txn.delete(key, db=dbs["documents"])
            for orphan in orphans:
                self._delete(txn, dbs, orphan)
            self._count(txn, dbs, b"generation", 1)
        return orphans

    def remove_chunks(self, keys: Iterable[bytes]) -> int:
        """Remove chunks, all in one transaction; how many were there. Documents that had them are precomputed again next time."""
        with self._writing() as (txn, dbs):
            removed = sum(self._delete(txn, dbs, key) for key in keys)
            self._count(txn, dbs, b"generation", 1)
        return removed

    # inside

    def _connect(self, create: bool) -> None:
        self._pid = os.getpid()
        self._env = open_environment(self.path, write=self._write, create=create, force=self._force)
        with _translated(self.path):
            try:
                self._dbs = {n: self._env.open_db(n.encode(), create=self._write) for n in DATABASES}
            except lmdb.NotFoundError as error:
                raise StoreFormat(
                    f"{self.path} is an LMDB file, and no cacheblend store", "name another --store"
                ) from error
            except lmdb.ReadonlyError as error:
                raise StoreFormat(
                    f"{self.path} is an LMDB file, and no cacheblend store", "name another --store"
                ) from error

    def _environment(self) -> lmdb.Environment:
        if self._pid != os.getpid():  # a forked child must not use its parent's map and locks
            self._connect(create=False)
        return self._env

    def _identify(self) -> str:
        with self.read() as reader:
            version, identity = reader.meta(b"format_version"), reader.meta(b"identity")
        if version is None and self._write:
            with self._writing() as (txn, dbs):
                if txn.get(b"identity", db=dbs["meta"]) is None:
                    txn.put(b"format_version", str(FORMAT_VERSION).encode(), db=dbs["meta"])
                    txn.put(b"identity", uuid.uuid4().hex.encode(), db=dbs["meta"])
            return self._identify()
        if version is None or identity is None:
            raise StoreFormat(f"{self.path} has no identity record: it is no cacheblend store", "name another --store")
        if version != str(FORMAT_VERSION).encode():
            raise StoreFormat(
                f"the store at {self.path} has format {version.decode(errors='replace')}, this version reads {FORMAT_VERSION}",
                "use another --store, or the version of cacheblend that wrote it",
            )
        return identity.decode()

    @contextmanager
    def _writing(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        if not self._write:
            raise StorePermission(f"the store at {self.path} is open for reading only", "open it with mode='write'")
        env = self._environment()
        with writer_lock(self.path, self._lock_timeout), _translated(self.path), env.begin(write=True) as txn:
            yield txn, self._dbs

    def _manifest_in(self, txn: Any, dbs: Mapping[str, Any], key: bytes) -> ChunkManifest | None:
        value = txn.get(key, db=dbs["chunks"])
        try:
            return decode_manifest(key, value) if value is not None else None
        except BadBlob:
            return None

    def _holds(self, txn: Any, dbs: Mapping[str, Any], key: bytes, blobs: Sequence[bytes]) -> bool:
        """Whether the bytes on disk are these: a record whose digests match can stand over a damaged blob."""
        return all(txn.get(key + i.to_bytes(4, "big"), db=dbs["blobs"]) == blob for i, blob in enumerate(blobs))

    def _delete(self, txn: Any, dbs: Mapping[str, Any], key: bytes) -> bool:
        """Remove manifest, blobs and accounting of a chunk, whatever state they are in."""
        freed, cursor = 0, txn.cursor(db=dbs["blobs"])
        if cursor.set_range(key):
            while cursor.key() and bytes(cursor.key()[:KEY_BYTES]) == key:
                freed += len(cursor.value())
                if not cursor.delete():
                    break
        self._count(txn, dbs, b"live_bytes", -freed)
        txn.delete(key, db=dbs["lru"])
        return bool(txn.delete(key, db=dbs["chunks"]))

    def _unref(self, txn: Any, dbs: Mapping[str, Any], document: bytes, keep: set[bytes]) -> list[bytes]:
        value = txn.get(document, db=dbs["documents"])
        if value is None:
            return []
        try:
            old = {c.key for c in decode_document(document, value).chunks}
        except BadBlob:
            return []
        orphans = []
        for key in old:
            txn.delete(key + document, db=dbs["refs"])
            cursor = txn.cursor(db=dbs["refs"])
            referred = cursor.set_range(key) and bytes(cursor.key()[:KEY_BYTES]) == key
            if key not in keep and not referred:
                orphans.append(key)
        return orphans

    def _count(self, txn: Any, dbs: Mapping[str, Any], name: bytes, change: int) -> None:
        value = int(bytes(txn.get(name, db=dbs["meta"]) or b"0"))
        txn.put(name, str(max(0, value + change)).encode(), db=dbs["meta"])


class StoreReader:
    """One read transaction. All views are into the map and end with it: copy what is to outlive it."""

    def __init__(self, transaction: Any, dbs: Mapping[str, Any]) -> None:
        self._txn, self._dbs = transaction, dbs

    def manifest(self, key: bytes) -> ChunkManifest | None:
        """Raises BadBlob when the record is damaged."""
        value = self._txn.get(key, db=self._dbs["chunks"])
        return None if value is None else decode_manifest(key, value)

    def layer(self, manifest: ChunkManifest, layer: int, *, verify: bool = True) -> dict[str, memoryview]:
        """The tensors of one layer's blob as views. Raises BadBlob when it is missing, damaged or of another shape."""
        blob = self._txn.get(manifest.key + layer.to_bytes(4, "big"), db=self._dbs["blobs"])
        name = f"layer {layer} of chunk {manifest.id[:12]}"
        if blob is None:
            raise BadBlob(f"{name} is missing")
        if len(blob) != manifest.blob_sizes[layer]:
            raise BadBlob(f"{name} has {len(blob)} bytes, and {manifest.blob_sizes[layer]} were written")
        if verify and blob_digest(manifest.key, layer, manifest.num_tokens, blob) != manifest.blob_digests[layer]:
            raise BadBlob(f"{name} does not match its digest")
        spec = blob_spec(manifest.codec, manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim)
        return parse_blob(blob, spec)

    def keys_from(self, start: bytes) -> Iterator[bytes]:
        """Chunk keys from `start` on, in order."""
        cursor = self._txn.cursor(db=self._dbs["chunks"])
        if cursor.set_range(start) if start else cursor.first():
            for key in cursor.iternext(keys=True, values=False):
                yield bytes(key)

    def document(self, key: bytes) -> DocumentRecord | None:
        value = self._txn.get(key, db=self._dbs["documents"])
        try:
            return None if value is None else decode_document(key, value)
        except BadBlob:
            return None

    def documents(self) -> Iterator[DocumentRecord]:
        cursor = self._txn.cursor(db=self._dbs["documents"])
        for key, value in cursor.iternext():
            try:
                yield decode_document(bytes(key), value)
            except BadBlob:
                continue

    def meta(self, name: bytes) -> bytes | None:
        value = self._txn.get(name, db=self._dbs["meta"])
        return None if value is None else bytes(value)

    def counter(self, name: bytes) -> int:
        return int(self.meta(name) or b"0")

    def entries(self, database: str) -> int:
        return int(self._txn.stat(self._dbs[database])["entries"])

    def database_stats(self) -> list[dict[str, int]]:
        return [self._txn.stat(db) for db in self._dbs.values()]


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """LMDB's errors as ours."""
    try:
        yield
    except StoreError:
        raise
    except lmdb.MapFullError as error:
        raise StoreFull(f"the store at {path} has no room in its map", "remove chunks: cacheblend chunks rm") from error
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadTxnError, lmdb.InvalidError) as error:
        raise StoreCorrupt(
            f"the store at {path} is damaged: {error}", "move it away and run cacheblend precompute"
        ) from error
    except lmdb.DiskError as error:
        raise StoreNoSpace(f"the disk of {path} is full: {error}", "free some space") from error
    except lmdb.Error as error:
        if "No space left" in str(error):
            raise StoreNoSpace(f"the disk of {path} is full: {error}", "free some space") from error
        raise StoreIOError(f"reading or writing the store at {path} failed: {error}", "check the disk") from error
