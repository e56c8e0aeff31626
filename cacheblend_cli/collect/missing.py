"""Chunks of a store's documents that have no KV yet, and the computation of the next ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeGuard

from cacheblend_store import ChunkManifest, ChunkStore, StoreReader

from cacheblend_cli.cancellation import Cancelled, Check
from cacheblend_cli.collect.collect_lock import collecting_alone
from cacheblend_cli.collect.collector import Collector, planned_of
from cacheblend_cli.collect.prefill import pack_tokens
from cacheblend_cli.prompt.collection import Collection


class _Everything(Container[bytes]):
    """The keys of all chunks: none may be evicted."""

    def __contains__(self, _: object) -> bool:
        return True


class MissingChunks:
    """Chunks of documents that have no KV yet, those of the latest documents first.

    Chunks whose KV was evicted are not among them: it went by the user's wish, or by the quota.
    """

    def __init__(self, store: ChunkStore, collections: Callable[[], Sequence[Collection]], check: Check) -> None:
        """collections: return those that the engine can compute. check: called between layers, may cancel."""
        self._store, self._collections, self._check = store, collections, check
        self._generation = 0  # of the store when it was last read
        self._queue: dict[bytes, None] = {}  # keys, in order
        self._collectors: dict[str, Collector] = {}  # by collection id

    @property
    def number(self) -> int | None:
        """Number of missing chunks when they were last read, None before."""
        return len(self._queue) if self._generation else None

    def read_all(self) -> int:
        """Read which chunks are missing. Return their number."""
        self.refresh()
        with self._store.read() as reader:
            queue = [*self._queue]  # a launch may take chunks from it meanwhile
            self._queue = dict.fromkeys(k for k in queue if _is_missing(reader.undamaged(k), self._collectors))
        return len(self._queue)

    def refresh(self) -> int:
        """Read which chunks of new and changed documents are missing. Return the number of all; others may have stored
        KV of some meanwhile."""
        with self._store.read() as reader:
            if reader.state().generation == self._generation:
                return len(self._queue)
        collections = {collection.id: collection for collection in self._collections()}
        with self._store.read() as reader:
            same = self._collectors.keys() == collections.keys()
            changes = reader.changes_since(self._generation) if same else None
            before, changed = {}, reader.keys_from(b"", "documents")
            if changes is not None:
                before, changed = self._queue, iter(changes.documents)
            self._queue = dict.fromkeys(_missing(reader, collections, changed)) | before
            self._generation = reader.state().generation
        if not same:
            keep = _Everything()
            self._collectors = {
                name: Collector(collection, self._store, keep, only_known=True, check=self._check)
                for name, collection in collections.items()
            }
        return len(self._queue)

    def compute(self, found: Iterable[bytes]) -> int:
        """Compute and store the next chunks, `found` ones first, in one launch or for one window of a document. Return
        their number, 0 if no chunk is left that fits the quota, or others compute. Nothing is evicted.

        Raises StoreErrors, DeviceError, and Cancelled. After another error the others come first.
        """
        with collecting_alone(self._store) as alone:
            batch = self._next(found) if alone else []
            return self._store_all(batch) if batch else 0

    def _store_all(self, batch: Sequence[ChunkManifest]) -> int:
        stored = 0
        collector = self._collectors[batch[0].collection]
        collector.collection.model.loaded.check_files()
        planned = [planned_of(manifest) for manifest in batch]
        try:
            for done in collector.store(planned, fetch=False, every_s=0.0):
                self._queue.pop(done.key, None)
                stored += 1
        except Cancelled:
            raise
        except Exception:
            for manifest in batch:
                if manifest.key in self._queue:
                    self._queue[manifest.key] = self._queue.pop(manifest.key)
            raise
        return stored

    def _next(self, found: Iterable[bytes]) -> list[ChunkManifest]:
        """Return the chunks of the next launch. Drops chunks that are not missing any more, or do not fit the quota."""
        batch = list[ChunkManifest]()
        with self._store.read() as reader:
            state, queue = reader.state(), self._queue
            room = state.max_bytes - state.live_bytes - (state.text_bytes or 0) - (state.document_bytes or 0)
            for key in dict.fromkeys([*(key for key in found if key in queue), *queue]):
                manifest = reader.undamaged(key)
                if not _is_missing(manifest, self._collectors):
                    queue.pop(key, None)
                    continue
                collection = self._collectors[manifest.collection].collection
                num_bytes = collection.stored_bytes(manifest.num_tokens)
                if state.max_bytes and num_bytes > room:
                    queue.pop(key, None)
                    continue
                if batch and not _goes_with(batch, manifest, pack_tokens(collection.decoder.device)):
                    break
                batch.append(manifest)
                room -= num_bytes
        return batch


def _missing(reader: StoreReader, collections: Container[str], documents: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the keys of the documents' missing chunks in order. Documents with a summary have none."""
    without = (reader.document(key) for key in documents if reader.summary(key) is None)
    records = [record for record in without if record is not None and record.collection in collections]
    for record in sorted(records, key=lambda record: record.updated, reverse=True):
        for chunk in record.chunks:
            if _is_missing(reader.undamaged(chunk.key), collections):
                yield chunk.key


def _is_missing(manifest: ChunkManifest | None, collections: Container[str]) -> TypeGuard[ChunkManifest]:
    return manifest is not None and not (manifest.has_kv or manifest.evicted) and manifest.collection in collections


def _goes_with(batch: Sequence[ChunkManifest], following: ChunkManifest, most: int) -> bool:
    """Return whether a chunk can be computed with others: it attends to the last one, or fits their launch."""
    last = batch[-1]
    if last.collection != following.collection:
        return False
    if following.left_context_ids and following.left_context_ids == (*last.left_context_ids, *last.token_ids):
        return True
    num_tokens = sum(len(manifest.left_context_ids) + manifest.num_tokens for manifest in (*batch, following))
    return num_tokens <= most
