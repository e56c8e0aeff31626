"""Collect chunks: compute their KV after the prefix, encode and store it. Imports torch when it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore
from cacheblend_store.format.records import encode_manifest

from cacheblend_cli.cancellation import Check, go_on
from cacheblend_cli.collect.commits import Whole, commit
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import keep_record

if TYPE_CHECKING:
    from cacheblend_store.tier import Tier

    from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, PrefixKV
    from cacheblend_cli.model.loading import LoadedModel

PREFIX_SOURCE = "(prefix)"
_TEXTS = 1024  # records per transaction
_TIER_BYTES = 64 << 20  # bytes of chunks read from a tier concurrently
_FIND_S, _READ_S = 2.0, 30.0  # timeouts of a tier, seconds


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk to collect, or a chunk in the store."""

    key: bytes
    source: str  # document name, see corpus/places.py
    chunk: Chunk
    left: tuple[int, ...]  # left context: token ids between the prefix and the chunk
    context: str  # kind of left context, see corpus/contexts.py
    keeps_state: bool = True  # a hybrid's state after it is stored


ChunkStatus = Literal["new", "unchanged", "replaced"]
How = Literal["fetched", "computed"]


class CollectedChunk(NamedTuple):
    """A chunk whose KV is durable."""

    key: bytes
    status: ChunkStatus
    how: How


class Collector:
    """Collects chunks of one collection after its prefix, and writes their KV to a store.

    The first write also stores the collection's record, by which later runs and questions recognise its chunks. The KV
    of the prefix is computed on first use.
    """

    def __init__(
        self,
        collection: Collection,
        store: ChunkStore | None = None,
        keep: Container[bytes] = frozenset(),
        *,
        with_prefix: bool = True,
        only_known: bool = False,
        check: Check = go_on,
    ) -> None:
        """keep: keys of chunks that must not be evicted to make room. with_prefix: store the prefix's KV too.
        only_known: store no chunk whose record is removed while it is computed. check: called between layers, may
        cancel."""
        self.collection, self._given, self._keep, self._with_prefix = collection, store, keep, with_prefix
        self._only_known, self._check = only_known, check

    @cached_property
    def prefix(self) -> PrefixKV:
        from cacheblend_cli.collect.prefill import collect_prefix

        collection = self.collection
        return collect_prefix(collection.decoder, collection.prefix_ids, collection.prefix_key)

    def collect(self, chunks: Sequence[PlannedChunk]) -> Iterator[ChunkKV]:
        """Yield the KV of every chunk, in order.

        Raises DeviceError if the device runs out of memory for a single chunk.
        """
        from cacheblend_cli.collect.prefill import collect

        yield from collect(self.collection.decoder, self.prefix, collect_sequences(chunks), self._check)

    def present(self, chunks: Sequence[PlannedChunk]) -> set[bytes]:
        """Return the keys of chunks with KV outside the store, which need not be computed. Subclasses override this."""
        return set()

    def begin(self) -> None:
        """Store the prefix's KV once as a separate chunk, so that `ask` loads it instead of computing it. Replaces
        damaged KV. `store` calls this first."""
        if self._with_prefix and self.collection.prefix_ids and not self._has_prefix:
            from cacheblend_cli.collect.encoding import encode_chunk

            self.collection.model.loaded.check_files()
            blobs = encode_chunk(self.prefix.kv, self.collection.prefix_codec).blobs()
            self.put_blobs(prefix_chunk(self.collection), blobs)
        self._with_prefix = False  # it is stored now

    @property
    def _has_prefix(self) -> bool:
        """Return whether the prefix's KV is stored, undamaged."""
        try:
            return self._store.get_blobs(self.collection.prefix_key) is not None
        except BadBlob:
            return False

    def store(
        self, chunks: Sequence[PlannedChunk], *, again: bool = False, fetch: bool = True, every_s: float | None = None
    ) -> Iterator[CollectedChunk]:
        """Store the KV of chunks, each key once: fetch KV from the tier, compute the rest. Yields each chunk once it is
        durable.

        again: compute all of them. fetch: False not to wait for the tier. every_s: see `commit`. Raises StoreErrors,
        DeviceError.
        """
        self.begin()
        left = {planned.key: planned for planned in chunks}
        ways: dict[How, Callable[[Sequence[PlannedChunk]], Iterator[Whole]]] = {
            **({"fetched": self._from_tier} if fetch and not again else {}),
            "computed": self._computed,
        }
        for how, way in ways.items():
            for key, status in commit(
                self._store, way(list(left.values())), self._keep, every_s, only_known=self._only_known
            ):
                del left[key]
                if status != "gone":
                    yield CollectedChunk(key, status, how)

    def put_blobs(self, planned: PlannedChunk, blobs: Sequence[bytes]) -> None:
        self._store.put_chunks([(chunk_manifest(self.collection, planned), blobs)], self._keep)

    def store_texts(self, chunks: Sequence[PlannedChunk]) -> None:
        """Store missing chunks without KV, so that they can be listed, found and cited."""
        store = self._store
        for start in range(0, len(chunks), _TEXTS):
            texts = [chunk_manifest(self.collection, planned) for planned in chunks[start : start + _TEXTS]]
            store.put_records(texts, self._keep)

    @cached_property
    def _store(self) -> ChunkStore:
        """The store, with the collection's record."""
        assert self._given is not None, "a collector that stores has a store"
        keep_record(self._given, self.collection)
        return self._given

    def _computed(self, chunks: Sequence[PlannedChunk]) -> Iterator[Whole]:
        from cacheblend_cli.collect.encoding import encoded

        blobs_of = encoded(self.collect(chunks), self.collection.codec)
        for planned, (key, blobs) in zip(chunks, blobs_of, strict=True):
            assert planned.key == key
            yield chunk_manifest(self.collection, planned), blobs

    def _from_tier(self, chunks: Sequence[PlannedChunk]) -> Iterator[Whole]:
        """Yield the chunks in the tier, with at most about _TIER_BYTES of KV in memory."""
        tier = self._store.tier
        if tier is None:
            return
        from cacheblend_cli.kv.tiered_source import TieredSource

        waiting = {planned.key: chunk_manifest(self.collection, planned) for planned in chunks}
        while waiting and not tier.resting:
            window, num_bytes = list[ChunkManifest](), 0
            while waiting and num_bytes < _TIER_BYTES:
                window.append(waiting.pop(next(iter(waiting))))
                num_bytes += self.collection.stored_bytes(window[-1].num_tokens)
            source = TieredSource(self._store, tier, window, _READ_S, _FIND_S)
            for manifest in window:
                blobs = source.take(manifest.key)
                if blobs is not None:
                    yield manifest, blobs


@dataclass(frozen=True)
class ClusterJob:
    """Settings of a cluster's workers."""

    address: str  # text after the collector's name, "" for none
    workers: int
    load: Callable[[], LoadedModel]  # picklable; loads the model in this process's dtype
    fingerprint: str  # this process's model
    tier: Tier  # gets the KV
    tier_key_file: str  # "" for none
    cpus: int  # per worker
    gpus: int  # per worker


class Cluster(Protocol):
    """Computes KV elsewhere. A collector of another distribution creates it from a ClusterJob."""

    workers: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def collector(self, collection: Collection, store: ChunkStore) -> Collector:
        """Return the collector that writes KV of a collection's chunks to the tier, and their texts to the store."""
        ...


def prefix_chunk(collection: Collection) -> PlannedChunk:
    """Return the prefix of the prompt as a separate chunk."""
    ids, text = collection.prefix_ids, collection.template.prefix_text
    return PlannedChunk(collection.prefix_key, PREFIX_SOURCE, Chunk(0, text, ids, 0, len(text)), (), "prefix")


def chunk_manifest(collection: Collection, planned: PlannedChunk) -> ChunkManifest:
    """Return the manifest of a chunk, without blob sizes and digests."""
    chunk, model, layout = planned.chunk, collection.model, collection.state_layout
    before = 0 if planned.context == "prefix" else len(collection.prefix_ids) + len(planned.left)
    return ChunkManifest(
        key=planned.key,
        token_ids=chunk.token_ids,
        text=chunk.text,
        model=model.fingerprint,
        model_name=model.name,
        tokenizer=model.tokenizer.fingerprint,
        collection=collection.id,
        context=planned.context,
        left_context_ids=planned.left,
        collected_len=before + len(chunk.token_ids),
        codec=collection.prefix_codec if planned.context == "prefix" else collection.codec,
        num_layers=model.spec.num_kv_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        layer_shapes=() if model.spec.shapes is None else tuple((heads, dim) for heads, dim in model.spec.kv_shapes),
        v_head_dim=0 if model.spec.latent is None else model.spec.latent.rank,
        state=layout.stored if layout is not None and planned.keeps_state else (),
        source=planned.source,
        index=chunk.index,
        span=(chunk.start, chunk.end),
        created=float(int(time.time())),  # whole seconds, so that `record_bytes` can predict the size of the record
    )


def planned_of(manifest: ChunkManifest) -> PlannedChunk:
    chunk = Chunk(manifest.index, manifest.text, manifest.token_ids, *manifest.span)
    keeps_state = bool(manifest.state)
    return PlannedChunk(manifest.key, manifest.source, chunk, manifest.left_context_ids, manifest.context, keeps_state)


def record_bytes(collection: Collection, planned: PlannedChunk) -> int:
    """Return the size in bytes of a chunk's record with KV."""
    manifest = chunk_manifest(collection, planned).without_kv()
    return record_bytes_with_kv(collection, manifest, len(encode_manifest(manifest)))


def record_bytes_with_kv(collection: Collection, manifest: ChunkManifest, num_bytes: int) -> int:
    """Return the size in bytes of a record once its chunk has KV. Without KV, the record holds a 0 for each blob size.

    num_bytes: current size of the record.
    """
    if manifest.has_kv:
        return num_bytes
    return num_bytes + sum(len(str(size)) - 1 for size in collection.blob_sizes(manifest.num_tokens))


def collect_sequences(chunks: Sequence[PlannedChunk]) -> list[CollectSequence]:
    """Return the sequences to prefill.

    Consecutive chunks of one window share a sequence: each attends to the ones before.
    """
    from cacheblend_cli.collect.prefill import CollectSequence, Kept

    out: list[CollectSequence] = []
    for planned in chunks:
        ids = (*planned.left, *planned.chunk.token_ids)
        kept = Kept(planned.key, len(planned.left), len(ids), planned.keeps_state)
        if planned.left and out and out[-1].token_ids == planned.left:
            out[-1] = CollectSequence(ids, (*out[-1].kept, kept))
        else:
            out.append(CollectSequence(ids, (kept,)))
    return out
