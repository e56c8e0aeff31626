"""Chunks of a request: the store's records, each read once, and their inputs for the request's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, StoreReader
from cacheblend_store.format.blobs import REMOVED
from cacheblend_store.format.records import document_key

from cacheblend_cli.corpus.citations import Citation, Citations
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.request.request import RequestChunk, to_compute
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.settings.fields import KV_DTYPES
from cacheblend_cli.types import Scope

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk


class ChunkRecords:
    """Chunks of the request's documents, and manifests and documents of stored ones, each read once, in one read
    transaction that begins with the first of them. A context manager, for one thread."""

    def __init__(
        self, store: ChunkStore | None, cite_first: Scope | None = None, planned: Mapping[bytes, PlannedChunk] = {}
    ) -> None:
        """store: None for a request without stored chunks. cite_first: see `Citations`. planned: chunks of the
        request's documents by key, which the store may lack."""
        self.store, self.planned, self._cite_first, self._open = store, planned, cite_first, ExitStack()
        self._found: dict[bytes, ChunkManifest | None] = {}
        self._damaged: dict[bytes, BadBlob] = {}

    def __enter__(self) -> ChunkRecords:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def get(self, key: bytes) -> ChunkManifest | None:
        """Return the chunk's record, None if it is missing or damaged."""
        if key not in self._found and self.store is not None:
            try:
                self._found[key] = self._reader.manifest(key)
            except BadBlob as error:
                self._found[key], self._damaged[key] = None, error
        return self._found.get(key)

    def named(self, key: bytes) -> ChunkManifest:
        """Return the record of a chunk. Raises NotFoundError if it is missing or damaged."""
        if (manifest := self.get(key)) is not None:
            return manifest
        if (damage := self.damage(key)) is not None:
            raise NotFoundError(
                f"the record of chunk {key.hex()[:12]} is damaged: {damage.message}",
                "run cacheblend precompute on its document again",
            ) from damage
        raise NotFoundError(f"no chunk {key.hex()[:12]} in the store", "list the ids: cacheblend chunks ls")

    def num_tokens(self, key: bytes) -> int:
        """Return the length of a chunk, 0 if it is missing."""
        if key in self.planned:
            return len(self.planned[key].chunk.token_ids)
        return manifest.num_tokens if (manifest := self.get(key)) else 0

    def has_kv(self, key: bytes) -> bool:
        manifest = self.get(key)
        return manifest is not None and manifest.has_kv

    def damage(self, key: bytes) -> BadBlob | None:
        """Return the error of a chunk's record that was looked up, None if it is not damaged."""
        return self._damaged.get(key)

    def cite(self, manifest: ChunkManifest) -> Citation:
        """Return the document that contains the chunk."""
        return self._citations.of(manifest)

    def keys_of(self, collection: str, source: str, context: str) -> list[bytes]:
        """Return the keys of a document's chunks in order, [] if it is not stored in this context."""
        record = None if self.store is None else self._reader.document(document_key(collection, source, context))
        return [] if record is None else [chunk.key for chunk in record.chunks]

    @property
    def damaged_documents(self) -> bool:
        """Return whether the record of a looked-up document could not be read."""
        return "_citations" in vars(self) and self._citations.damaged

    @cached_property
    def _reader(self) -> StoreReader:
        assert self.store is not None
        return self._open.enter_context(self.store.read())

    @cached_property
    def _citations(self) -> Citations:
        assert self.store is not None
        return Citations(self.store, self._cite_first, self._reader)


def in_stored_codec(
    collection: Collection, prompts: Prompts, stored: ChunkRecords, keys: Sequence[bytes]
) -> Collection:
    """Return the collection in the codec of the first of the chunks that this model has KV for, if the engine's
    settings name none, and could name that one."""
    if prompts.config.kv_dtype != "auto":
        return collection
    known = collection.prefix_codec, *KV_DTYPES
    own = (m for m in map(stored.get, keys) if m is not None and m.model == prompts.model.fingerprint)
    first = next((m for m in own if m.codec in known), None)
    return collection if first is None else collection.in_codec(first.codec)


def request_chunks(
    collection: Collection, stored: ChunkRecords, keys: Sequence[bytes], ranks: Mapping[bytes, int], notes: list[str]
) -> tuple[RequestChunk, ...]:
    """Return the inputs of the chunks for this model. Raises NotFoundError."""
    found = []
    for key in keys:
        new = stored.planned.get(key)
        if new is not None and stored.get(key) is None:
            cited, manifest = Citation(new.source, new.chunk.index, new.chunk.locator), None
            ids = new.chunk.token_ids
            used = ChunkInput(collection.key(ids, new.left), cited.source, ids, new.left, cached=False)
        else:
            named = stored.named(key)
            used, manifest = _as_input(collection, stored, named, notes)
            cited = stored.cite(named)
            used = replace(used, source=cited.source)
        found.append(RequestChunk(key, used, cited, manifest, new, ranks.get(key)))
    if stored.damaged_documents:
        notes.append(
            "document records are damaged, so the places of their chunks are unknown (cacheblend chunks verify --repair, then "
            "precompute)"
        )
    return tuple(found)


def _as_input(
    collection: Collection, stored: ChunkRecords, manifest: ChunkManifest, notes: list[str]
) -> tuple[ChunkInput, ChunkManifest]:
    """Return a stored chunk's input for this model, and its record.

    Same model: load the KV as stored, in its codec and dtype. Other model or salt, or a removed codec: use the text,
    with this model's KV of it in the collection's codec, if stored and undamaged. Otherwise, and without KV, compute
    the chunk.
    """
    model, same = collection.model, replace(collection, codec=manifest.codec)
    own = next((c for c in (same, *same.in_other_dtypes()) if c.id == manifest.collection), None)
    if own is not None and manifest.codec not in REMOVED:
        chunk = ChunkInput(
            manifest.key,
            manifest.source,
            manifest.token_ids,
            manifest.left_context_ids,
            cached=manifest.has_kv,
            same_regime=collection.decoder.rope.regime(manifest.collected_len) == 0,
            codec=manifest.codec,
            computed_in=own.computed_in,
            has_state=bool(manifest.state) and manifest.has_kv,
        )
        if own.computed_in and model.spec.recurrent:
            notes.append(f"chunk {manifest.id[:12]} was computed in {own.computed_in}: it is computed again")
            return to_compute(chunk, collection), manifest
        return (chunk if chunk.cached else to_compute(chunk, collection)), manifest
    token_ids = tuple(model.tokenizer.encode_text(manifest.text)) if own is None else manifest.token_ids
    lefts = dict.fromkeys((manifest.left_context_ids, ()))  # the same context first
    found = [m for left in lefts if (m := stored.get(collection.key(token_ids, left)))]
    if found:
        return _as_input(collection, stored, max(found, key=lambda m: m.has_kv), notes)
    what = f"has no KV of this model in {collection.codec}: it is computed"
    if own is not None:
        what = f"is stored as {manifest.codec}, which was removed: it is computed; precompute stores it again"
    notes.append(f"chunk {manifest.id[:12]} {what}")
    return ChunkInput(collection.key(token_ids), manifest.source, token_ids, cached=False), manifest
