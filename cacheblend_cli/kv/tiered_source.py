"""A store and its tier as one source of a prompt's KV. Imported only where a tier is set."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, LayerReads, StoreError, StoreReader, TierError
from cacheblend_store.format.blobs import blob_prefix
from cacheblend_store.format.records import layer_spec
from cacheblend_store.tier.layout import Head, ObjectLayout
from cacheblend_store.tier.shared import SharedTier

from cacheblend_cli.kv.source import ChunkReader
from cacheblend_cli.types import TierUse


class _TierChunk:
    """A chunk in the tier. manifest: the expected one. futures: reads of its groups, once requested."""

    def __init__(self, manifest: ChunkManifest, layout: ObjectLayout) -> None:
        self.manifest, self.layout, self.groups = manifest, layout, layout.groups()
        self.futures: list[Future[memoryview]] = []
        self.head: Head | None = None

    @property
    def arrived(self) -> bool:
        return bool(self.futures) and all(
            f.done() and not f.cancelled() and f.exception() is None for f in self.futures
        )


class TieredSource:
    """The store's chunks, and those of one prompt that only its tier has.

    Reading begins with the first layer that is requested: layer 0 of every chunk first, then the next. A chunk that
    does not arrive in time, or differs from the expected one, raises StoreError. At the timeout, all missing chunks
    become `lost`. Data that was read stays in memory, for `blobs`.
    """

    def __init__(
        self, store: ChunkStore, tier: SharedTier, chunks: Sequence[ChunkManifest], patience_s: float, find_s: float | None = None
    ) -> None:  # fmt: skip
        """Ask the tier which of the chunks it has. patience_s: longest wait for their KV, from the first read. find_s:
        longest wait for the list of chunks, by default the tier's deadline."""
        self._store, self._tier, self._patience_s = store, tier, max(patience_s, tier.deadline_s)
        shapes = {chunk.key: chunk for chunk in chunks}
        self._chunks = {key: _TierChunk(shapes[key], layout) for key, layout in tier.find(chunks, find_s).items()}
        self.lost: set[bytes] = set()
        self._asked, self._lock = len(shapes), threading.RLock()  # re-entrant: a finished future calls back at once
        self._wanted: dict[bytes, _TierChunk] = {}
        self._until: float | None = None
        self._begun = self._seconds = 0.0
        self._left = self._num_bytes = 0

    @property
    def found(self) -> Set[bytes]:
        """Keys of chunks that the tier has and that were not lost."""
        return self._chunks.keys() - self.lost

    @property
    def use(self) -> TierUse:
        taken = sum(self._chunks[key].head is not None and self._chunks[key].arrived for key in self.found)
        return TierUse(self._asked, len(self._chunks), taken, len(self.lost), self._num_bytes, self._seconds)

    @contextmanager
    def read(self) -> Iterator[ChunkReader]:
        with self._store.read() as reader:
            yield _TieredReader(self, reader)

    def expected(self, key: bytes) -> ChunkManifest | None:
        """Return the manifest expected of a chunk of the tier, and read it with the next `layer`. None if the tier does
        not have it."""
        if key not in self.found:
            return None
        with self._lock:
            return self._wanted.setdefault(key, self._chunks[key]).manifest

    def is_expected(self, manifest: ChunkManifest) -> bool:
        return manifest.key in self._wanted and self._wanted[manifest.key].manifest is manifest

    def layer(self, key: bytes, layer: int) -> bytes | memoryview:
        """Return a layer's blob, checked. Raises StoreError if it does not arrive in time or cannot be used."""
        chunk = self._chunks[key]
        self._begin()
        try:
            number = next(i for i, group in enumerate(chunk.groups) if layer in group)
            head, data = self._head(chunk), self._data(chunk, number)
            start, _ = chunk.layout.span(chunk.groups[number])
            return head.layer(layer, data[chunk.layout.layer(layer, start)])
        except BadBlob as error:
            with self._lock:  # several layers may be read at once, and one again
                is_new = key not in self.lost
                self.lost.add(key)
            if is_new:
                self._tier.refuse(key, error)
            raise
        except StoreError:
            self._give_up(key)
            raise

    def take(self, key: bytes) -> list[bytes] | None:
        """Return all layers of a chunk of the tier, reading it and the tier's other chunks. None if it is missing or
        cannot be used."""
        for other in self.found:
            self.expected(other)
        if key not in self.found:
            return None
        with suppress(StoreError):
            self.layer(key, self._chunks[key].layout.num_layers - 1)
        return self.blobs(key)

    def blobs(self, key: bytes) -> list[bytes] | None:
        """Return all layers of a chunk whose KV arrived and was used, None for any other chunk."""
        chunk = self._chunks.get(key)
        if chunk is None or key in self.lost or chunk.head is None or not chunk.arrived:
            return None
        try:
            return [bytes(self.layer(key, layer)) for layer in range(chunk.layout.num_layers)]
        except StoreError:
            return None

    def _begin(self) -> None:
        """Request the groups of all wanted chunks, in the order of their layers."""
        with self._lock:
            now = time.monotonic()
            if self._until is None:
                self._begun, self._until = now, now + self._patience_s
            new = [chunk for chunk in self._wanted.values() if not chunk.futures]
            parts = sorted(((group.start, chunk, group) for chunk in new for group in chunk.groups), key=itemgetter(0))
            self._left += len(parts)
            for _, chunk, group in parts:
                start, end = chunk.layout.span(group)
                chunk.futures.append(self._tier.read(chunk.manifest, start, end))
                chunk.futures[-1].add_done_callback(partial(self._came, end - start))

    def _came(self, num_bytes: int, future: Future[memoryview]) -> None:
        with self._lock:
            self._left -= 1
            if not future.cancelled() and future.exception() is None:
                self._num_bytes += num_bytes
                self._seconds = time.monotonic() - self._begun
            if not self._left:
                self._tier.measured(self._num_bytes, self._seconds)

    def _data(self, chunk: _TierChunk, number: int) -> memoryview:
        assert self._until is not None
        try:
            return chunk.futures[number].result(timeout=max(0.0, self._until - time.monotonic()))
        except (TimeoutError, CancelledError):
            raise TierError("its KV did not come from the tier in time") from None

    def _head(self, chunk: _TierChunk) -> Head:
        """Return the chunk's head. Raises BadBlob unless it has the expected tokens and shape."""
        if chunk.head is None:
            wanted = chunk.manifest
            tier = self._tier.tier
            head = tier.head(tier.name(wanted.collection, wanted.key), self._data(chunk, 0))
            fields = ("token_ids", "left_context_ids", "model", "codec", "num_layers", "shapes", "state")
            if head.num_bytes != chunk.layout.head_bytes or any(
                getattr(head.manifest, name) != getattr(wanted, name) for name in fields
            ):
                raise BadBlob("its object has other tokens or is from another model")
            chunk.head = head
        return chunk.head

    def _give_up(self, key: bytes) -> None:
        """Count this chunk as lost, and if time is up also every chunk that did not arrive."""
        with self._lock:
            late = self._until is not None and time.monotonic() >= self._until
            lost = {key} | ({k for k, c in self._wanted.items() if not c.arrived} if late else set())
            new, self.lost = lost - self.lost, self.lost | lost
            waiting = [future for k in new for future in self._chunks[k].futures]
        for future in waiting:
            future.cancel()
        if new and late:
            self._tier.gave_up()


class _TieredReader:
    """The store's snapshot first, then the tier."""

    version = None  # what the tier has may change

    def __init__(self, source: TieredSource, reader: StoreReader) -> None:
        self._source, self._reader = source, reader

    def manifest(self, key: bytes) -> ChunkManifest | None:
        own = self._reader.undamaged(key)
        if own is not None and own.has_kv:
            return own
        return self._source.expected(key) or self._reader.manifest(key)

    def locate(self, reads: LayerReads) -> None:
        if not self._source.is_expected(reads.manifest):
            self._reader.locate(reads)

    def read_layers(self, reads: LayerReads, group: int, buffer: memoryview) -> None:
        if not self._source.is_expected(reads.manifest):
            return self._reader.read_layers(reads, group, buffer)
        for layer, at in zip(reads.groups[group], reads.places, strict=False):
            self._copy(reads.manifest, layer, {name: buffer[start:end] for name, (start, end) in at.items()})
        return None

    def state_of(self, manifest: ChunkManifest) -> list[memoryview]:
        if not self._source.is_expected(manifest):
            return self._reader.state_of(manifest)
        spec = layer_spec(manifest, manifest.num_layers)
        parts = {name: memoryview(bytearray(tensor.num_bytes)) for name, tensor in spec.items()}
        self._copy(manifest, manifest.num_layers, parts)
        return list(parts.values())

    def _copy(self, manifest: ChunkManifest, layer: int, targets: Mapping[str, memoryview]) -> None:
        blob = memoryview(self._source.layer(manifest.key, layer))
        spec = layer_spec(manifest, layer)
        start = len(blob_prefix(spec))
        for name, tensor in spec.items():
            targets[name].cast("B")[:] = blob[start : start + tensor.num_bytes]
            start += tensor.num_bytes
