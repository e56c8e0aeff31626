"""The store: chunks and documents in one LMDB environment, one short transaction per call."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from cacheblend_store.errors import AmbiguousId, ChunkNotFound, StoreError, StoreFull, StoreNoSpace, StorePermission
from cacheblend_store.format import records
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import Blob, ChunkManifest, DocumentRecord, Memo
from cacheblend_store.format.summaries import DocumentSummary
from cacheblend_store.lmdb_file.directory import TREE_BYTES, check_directory, check_space, keep_reserve, use_reserve
from cacheblend_store.lmdb_file.environment import Environment, acquire, release
from cacheblend_store.lmdb_file.pages.reader import PageReader
from cacheblend_store.reader import StoreReader
from cacheblend_store.state import IDENTITY, new_identity, read_identity, sealed_identity, write_identity
from cacheblend_store.writer import PutStatus, StoreWriter

if TYPE_CHECKING:
    from cacheblend_store.tier.shared import SharedTier

PAGE_OF_CHUNKS = 64  # manifests that `chunks` reads per transaction
TOUCHES_HELD = 4096
FLUSH_S = 5.0
"""Seconds that closing a store waits for pending uploads to its tier."""
_STEP = 512  # records to free in one transaction
NO_PAGES = (
    "deleting needs about 1 MiB: remove another file on this disk; or move the store's folder to another disk, and run "
    "this there with --store"
)
Accept = Callable[[str], None]
"""Called with the identity of each data.mdb that is opened, before anything is written; raises to refuse it."""
T = TypeVar("T")


class ChunkStore:
    """Chunk KV on disk. Each method is one short transaction, durable on return.

    Use as a context manager; thread-safe. Opening a store twice in a process shares the environment. A forked child
    must open the store itself. Errors are StoreErrors with a message and a hint.
    """

    def __init__(
        self, path: Path, write: bool, create: bool, lock_timeout: float, force: bool, accept: Accept | None
    ) -> None:
        self.path, self.writable, self.lock_timeout, self.forced = path, write, lock_timeout, force
        self._accept = accept
        self._touched: dict[bytes, float] = {}
        self._touch_lock = threading.Lock()
        self.tier: SharedTier | None = None
        self._env: Environment | None = self._acquire(create=create)
        try:
            with self.read() as reader:
                self.identity = read_identity(reader.get, str(path))
            if accept is not None:  # another store of this process may have opened the environment without it
                accept(self.identity)
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
        max_bytes: int | None = None,
        lock_timeout: float = 30.0,
        force: bool = False,
        accept: Accept | None = None,
    ) -> ChunkStore:
        """Open a store.

        create: create a missing store; by default if mode == "write". max_bytes: new quota for KV and text in bytes,
        saved in the store (0: no quota; None: unchanged); excess is evicted. lock_timeout: seconds to wait for the
        writer lock. force: accept a network filesystem or a directory of another user. accept: refuses a data.mdb of
        another store, also one that appears while the store is open.
        """
        write = mode == "write"
        store = cls(Path(path), write, write if create is None else create, lock_timeout, force, accept)
        if write and store.is_own:
            keep_reserve(store.path)
        if max_bytes is not None and write and max_bytes != store.max_bytes:
            store.set_max_bytes(max_bytes)
        return store

    def _acquire(self, *, create: bool = False) -> Environment:
        check_directory(self.path, write=self.writable, create=create, force=self.forced)
        return acquire(self.path, self.lock_timeout, write_identity, self._check, force=self.forced)

    def _check(self, pages: PageReader) -> None:
        if self._accept is not None:
            self._accept(read_identity(StoreReader(pages).get, str(self.path)))

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.flush_touches()
                if self.tier is not None and (left := self.tier.close(FLUSH_S)):
                    self.tier.say(
                        f"{left} chunks were not put into the tier in {FLUSH_S:.0f} s; see: cacheblend chunks push"
                    )
        finally:
            self.close()

    def close(self) -> None:
        """Release the environment. The last store of the process on this path closes it. Can be called twice."""
        if self.tier is not None:
            self.tier.close()
        env, self._env = self._env, None
        if env is not None:
            release(env)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Close the store temporarily, for work that replaces data.mdb, and open it again afterwards."""
        self._environment()  # raises if the store is closed, so that it is not reopened
        self.close()
        try:
            yield
        finally:
            self._env = self._acquire()

    def share(self, tier: SharedTier) -> None:
        """Upload newly stored chunks to a tier in the background, until the store is closed. A store used as a context
        manager waits up to FLUSH_S for pending uploads."""
        self.tier = tier

    @property
    def is_own(self) -> bool:
        """Return whether the store belongs to this user alone (or was opened with force). In any other store nothing is
        created: no index, lock or socket."""
        return self._environment().is_own

    def check_file(self) -> None:
        """Raise StoreError if the data file was removed, truncated or replaced by another file. Takes no lock."""
        self._environment().check_file()

    @property
    def generation(self) -> int:
        """Counter that increases with every commit that adds or removes chunks or documents."""
        with self.read() as reader:
            return reader.state().generation

    @property
    def max_bytes(self) -> int:
        """Quota in bytes, 0 without one."""
        with self.read() as reader:
            return reader.state().max_bytes

    # reading

    @contextmanager
    def read(self) -> Iterator[StoreReader]:
        """Open a read transaction. Its reader is for one thread at a time, see `StoreReader`."""
        with (environment := self._environment()).reading() as pages:  # no file is opened again meanwhile
            yield StoreReader(pages, (environment.opening, pages.meta.txnid))

    def get_chunk(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest, or None if the chunk is not stored. Raises BadBlob if its record is damaged."""
        with self.read() as reader:
            return reader.manifest(key)

    def undamaged(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest, or None if it is missing or damaged."""
        with self.read() as reader:
            return reader.undamaged(key)

    def get_blobs(self, key: bytes) -> tuple[ChunkManifest, list[bytes]] | None:
        """Return a chunk with its blobs, or None if it has no KV. Raises BadBlob if its record or a blob is damaged."""
        with self.read() as reader:
            manifest = reader.manifest(key)
            if manifest is None or not manifest.has_kv:
                return None
            return manifest, [reader.blob(manifest, layer) for layer in range(manifest.num_blobs)]

    def has_chunk(self, key: bytes) -> bool:
        """Return whether the chunk is stored undamaged, with or without KV."""
        return self.undamaged(key) is not None

    def has_kv(self, key: bytes) -> bool:
        """Return whether an undamaged manifest says that the chunk has KV. Blobs are not checked."""
        with self.read() as reader:
            return reader.has_kv(key)

    def matching(self, prefix: str, limit: int = 4) -> list[bytes]:
        """Return up to `limit` keys whose hex ids begin with `prefix`, in order. Raises ChunkNotFound."""
        text = prefix.strip().lower()
        if not re.fullmatch(f"[0-9a-f]{{1,{2 * KEY_BYTES}}}", text):
            raise ChunkNotFound(f"{prefix!r} is not a chunk id", "ids are hex; list them: cacheblend chunks ls")
        with self.read() as reader:
            near = islice(reader.keys_from(bytes.fromhex(text.ljust(2 * KEY_BYTES, "0"))), limit)
            return [key for key in near if key.hex().startswith(text)]

    def resolve(self, prefix: str) -> bytes:
        """Return the key whose hex id begins with `prefix`. Raises ChunkNotFound, AmbiguousId."""
        found = [key.hex() for key in self.matching(prefix)]
        if not found:
            raise ChunkNotFound(f"no chunk has an id that begins with {prefix}", "list the ids: cacheblend chunks ls")
        if len(found) > 1:
            raise AmbiguousId(
                f"{prefix} begins more than one chunk id: {', '.join(i[: len(prefix.strip()) + 6] for i in found)}",
                "write more digits of the one you mean",
            )
        return bytes.fromhex(found[0])

    def chunks(self, *, start_after: bytes | None = None, prefixes: bool = False) -> Iterator[ChunkManifest]:
        """Yield chunks in key order, PAGE_OF_CHUNKS per transaction. Damaged records are skipped (see `damaged_keys`).
        start_after: last key of the previous page. prefixes: include the prefixes of prompts."""
        start = b"" if start_after is None else start_after + b"\0"
        while True:
            with self.read() as reader:
                keys = list(islice(reader.keys_from(start), PAGE_OF_CHUNKS))
                found = [reader.undamaged(key) for key in keys]
            yield from (m for m in found if m is not None and (prefixes or m.context != "prefix"))
            if not keys:
                return
            start = keys[-1] + b"\0"

    def damaged_keys(self) -> list[bytes]:
        """Return the keys of chunks with a damaged manifest."""
        with self.read() as reader:
            return [key for key in reader.keys_from(b"") if reader.undamaged(key) is None]

    def get_document(self, collection: str, source: str, context: str = "sink") -> DocumentRecord | None:
        """Return a document record, or None if it is missing or damaged (the next precompute then stores it again)."""
        with self.read() as reader:
            return reader.document(records.document_key(collection, source, context))

    def documents(self, collection: str | None = None) -> list[DocumentRecord]:
        """Return the document records of one collection, or of all, sorted by source."""
        with self.read() as reader:
            found = [d for d in reader.documents() if collection in (None, d.collection)]
        return sorted(found, key=lambda d: (d.source, d.collection, d.context))

    # writing

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[Blob]) -> PutStatus:
        """Store a complete chunk, the manifest and one blob per layer, in one transaction. It is durable on return.
        Fills in sizes and digests. Raises StoreNoSpace, StoreFull, StoreLocked, StoreIOError."""
        return self.put_chunks([(manifest, blobs)])[0]

    def put_chunks(
        self,
        chunks: Iterable[tuple[ChunkManifest, Sequence[Blob]]],
        keep: Container[bytes] = (),
        *,
        only_known: bool = False,
    ) -> list[PutStatus]:
        """Store several chunks in one transaction: either all are durable on return, or none is stored. Raises like
        `put_chunk`.

        A chunk that was stored without KV is "new". If the quota is exceeded, KV of the least recently used chunks is
        evicted, except for these chunks and the keys in `keep`. only_known: leave out chunks whose record was removed.
        """
        given = [(records.with_digests(manifest, blobs), blobs) for manifest, blobs in chunks]
        num_bytes = sum(manifest.num_bytes for manifest, _ in given)

        def make_room(most: int | None, writer: StoreWriter, spare: int = 0) -> bool:
            if not writer.state.max_bytes:
                return True
            sizes = {m.key: m.num_bytes + len(records.encode_manifest(m)) for m, _ in given}
            needed = sum(sizes.values()) - sum(map(writer.size_of, sizes))
            return writer.make_room(needed + spare, sizes, keep, most=most)

        try:
            check_space(self.path, num_bytes)
        except StoreNoSpace:
            with suppress(StoreFull):
                self._until_done(partial(make_room, spare=num_bytes // 4 + 2 * TREE_BYTES))
            with self.read() as reader:
                check_space(self.path, num_bytes, reader.pages.free_bytes)
            self.transact(StoreWriter.changed)  # LMDB reuses freed pages only from the second commit after that

        def put(writer: StoreWriter) -> list[PutStatus]:
            make_room(None, writer)
            # adjacent keys share pages, checked once
            in_order = sorted(range(len(given)), key=lambda i: given[i][0].key)
            now = time.time()  # distinct times: eviction follows the given order
            statuses = dict[int, PutStatus]()
            for i in in_order:
                is_gone = only_known and writer.get("chunks", given[i][0].key) is None
                statuses[i] = "gone" if is_gone else writer.put_chunk(*given[i], now + i * 1e-6)
            return [statuses[i] for i in range(len(given))]

        self.flush_touches()  # eviction needs up-to-date last uses
        statuses = self.transact(put)
        if self.tier is not None:
            new = [m.key for (m, _), status in zip(given, statuses, strict=True) if status not in ("unchanged", "gone")]
            self.tier.offer(new, self.get_blobs, partial(self.memo, records.COLLECTION))
        return statuses

    def put_records(self, manifests: Iterable[ChunkManifest], keep: Container[bytes] = ()) -> int:
        """Store chunks without KV and without a document, in one transaction, if they are missing. Return how many were
        missing.

        They count against the quota, and the least recently used are removed first. Raises StoreFull and the errors of
        `put_chunk`. keep: keys of chunks that must not be evicted.
        """
        given = list(manifests)

        def put(writer: StoreWriter) -> int:
            _make_room_for_texts(writer, given, keep)
            return sum(map(writer.put_record, given))

        return self.transact(put) if given else 0

    def put_documents(
        self,
        records: Sequence[DocumentRecord],
        removed: Collection[bytes] = (),
        texts: Sequence[ChunkManifest] = (),
        keep: Container[bytes] = (),
    ) -> list[bytes]:
        """Store document records in one transaction. A record replaces the one with the same collection, source and
        context.

        Return the keys of chunks that were removed because no document refers to them any more.

        removed: keys of records to remove. texts: chunks of the documents, to store without KV if they are missing. KV
        in the store is evicted to make room for them;
            they are stored even if they alone exceed the quota.
        keep: keys of chunks that must not be evicted.
        """

        def put(writer: StoreWriter) -> list[bytes]:
            dropped = writer.put_documents(records, removed)
            with suppress(StoreFull):
                _make_room_for_texts(writer, texts, keep)
            for manifest in texts:
                writer.put_record(manifest, owned=True)
            return dropped

        return self.transact(put) if records or removed or texts else []

    def put_summaries(self, summaries: Collection[DocumentSummary]) -> int:
        """Store document summaries in one transaction. Return how many were stored. Summaries of documents that are
        stored differently, or that lack KV, are dropped."""
        return self.transact(lambda writer: sum(map(writer.put_summary, summaries))) if summaries else 0

    def evict_chunks(self, keys: Iterable[bytes]) -> int:
        """Remove the KV of chunks and keep their records. Return how many had KV. Works on a full disk."""
        return sum(self._free(keys, lambda writer, some: sum(map(writer.evict, some))))

    def memos(self, kind: str) -> list[Memo]:
        """Return the memos of a kind, sorted by name. Damaged ones are skipped."""
        with self.read() as reader:
            return sorted((m for m in reader.memos() if m.kind == kind), key=lambda m: m.name)

    def memo(self, kind: str, name: str) -> Memo | None:
        """Return a memo, or None if it is missing or damaged."""
        with self.read() as reader:
            return reader.memo(records.memo_key(kind, name))

    def put_memos(self, memos: Sequence[Memo]) -> None:
        """Store memos in one transaction. A memo replaces the one with the same kind and name."""

        def put(writer: StoreWriter) -> None:
            for memo in memos:
                writer.put("meta", memo.key, records.encode_memo(memo))

        if memos:
            self.transact(put)

    def remove_memos(self, memos: Iterable[Memo]) -> None:
        """Remove memos. Works on a full disk."""
        self._free((memo.key for memo in memos), lambda writer, some: [writer.delete("meta", key) for key in some])

    def remove_chunks(self, keys: Iterable[bytes]) -> int:
        """Remove chunks. Return how many were stored. The next precompute restores them. Works on a full disk."""
        return sum(self._free(keys, lambda writer, some: sum(map(writer.delete_chunk, some))))

    def remove_documents(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove document records. Return the keys of the chunks that were removed with them. Works on a full
        disk."""
        dropped = self._free(keys, lambda writer, some: writer.put_documents((), some))
        return [key for some in dropped for key in some]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record in memory that chunks were used now; `flush_touches`, or closing the store, writes it."""
        if not self.writable:
            return
        now = time.time()
        with self._touch_lock:
            for key in keys:
                self._touched[key] = now
        if len(self._touched) >= TOUCHES_HELD:
            self.flush_touches()

    def flush_touches(self) -> bool:
        """Write the recorded uses in one transaction. Return whether all were written. Uses only affect eviction. If
        another process is writing, or the write fails, they are kept for the next call."""
        with self._touch_lock:
            uses, self._touched = self._touched, {}
        if not uses:
            return True
        try:
            self.transact(lambda writer: writer.touch(uses), lock_timeout=0.0)
        except StoreError:
            with self._touch_lock:
                self._touched = uses | self._touched
            return False
        return True

    def set_max_bytes(self, max_bytes: int) -> None:
        """Set the quota for KV and text in bytes, 0 = no quota. If it is exceeded, the least recently used chunks are
        evicted. Text of documents stays, even if it alone exceeds the quota."""

        self.flush_touches()

        def change(most: int, writer: StoreWriter) -> bool:
            writer.state = replace(writer.state, max_bytes=max_bytes)
            with suppress(StoreFull):
                return writer.make_room(0, most=most)
            return True

        self._until_done(change)

    def set_identity(self, identity: str | None = None) -> None:
        """Replace the random hex number that tells stores apart, by default by a new one."""
        identity = identity or new_identity()
        self.transact(lambda writer: writer.put("meta", IDENTITY, sealed_identity(identity)))
        self.identity = identity

    # inside

    def _environment(self) -> Environment:
        if self._env is None:
            raise StoreError(f"the store at {self.path} was closed", "open it again: ChunkStore.open")
        return self._env

    def transact(self, work: Callable[[StoreWriter], T], lock_timeout: float | None = None) -> T:
        """Run `work` in a write transaction and commit. lock_timeout: seconds to wait for the writer lock; by default
        the store's own timeout."""
        self.require_writable()
        timeout = self.lock_timeout if lock_timeout is None else lock_timeout
        with self._environment().writing(timeout) as (transaction, dbs, pages):
            writer = StoreWriter(transaction, dbs, pages)
            result = work(writer)
            writer.finish()
        return result

    def _in_steps(self, work: Callable[[int, StoreWriter], T]) -> Iterator[T]:
        """Yield the result of `work` after each commit. Its first argument is the most records to free in one.

        On a full disk the reserve is used, and single records are freed at first: a transaction writes new pages before
        the old ones are free, and these can be used from the second commit after it. Raises StoreNoSpace if there is no
        space even for that.
        """
        most = _STEP
        while True:
            try:
                result = self.transact(partial(work, most))
            except StoreNoSpace as error:
                if not use_reserve(self.path) and most == 1:
                    raise StoreNoSpace(error.message, NO_PAGES) from error
                most = 1
            else:
                yield result
                most = min(2 * most, _STEP)

    def _until_done(self, work: Callable[[int, StoreWriter], bool]) -> None:
        any(self._in_steps(work))

    def _free(self, keys: Iterable[bytes], free: Callable[[StoreWriter, Sequence[bytes]], T]) -> list[T]:
        left, results = list(keys), list[T]()
        steps = self._in_steps(lambda most, writer: (len(left[:most]), free(writer, left[:most])))
        while left:
            count, result = next(steps)
            del left[:count]
            results.append(result)
        return results

    def require_writable(self) -> None:
        if not self.writable:
            raise StorePermission(f"the store at {self.path} is open for reading only", "open it with mode='write'")


def _make_room_for_texts(writer: StoreWriter, manifests: Sequence[ChunkManifest], keep: Container[bytes]) -> None:
    """Make room for the records of missing chunks. Raises StoreFull."""
    if writer.state.max_bytes:
        sizes = {
            m.key: 0 if writer.manifest(m.key) else len(records.encode_manifest(m.without_kv())) for m in manifests
        }
        writer.make_room(sum(sizes.values()), sizes, keep)
