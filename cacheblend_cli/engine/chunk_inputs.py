"""The chunks of a request as its model sees them, and the template around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore

from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import PLAIN, AskRequest


def dated(runtime: Runtime, store: ChunkStore | None, ask: AskRequest) -> AskRequest:
    """Return the request with its date, so that all of its preparation reads the same template."""
    return ask if ask.day is not None else replace(ask, day=runtime.day(store, ask.salt))


def wording_of(runtime: Runtime, ask: AskRequest) -> Wording:
    """Return the engine's wording with the request's own prompts."""
    own = runtime.template.wording
    if ask.raw:
        return Wording(PLAIN, raw=True)
    system = own.system if ask.system is None else ask.system.strip()
    return replace(own, prompt=ask.prompt or own.prompt, system=system)


def suffix_of(runtime: Runtime, ask: AskRequest) -> tuple[int, ...]:
    """Return the token ids after the request's chunks. Raises UsageError."""
    return runtime.template_of(wording_of(runtime, ask), ask.day).suffix_ids(ask.question, ask.history)


def collection_of(runtime: Runtime, store: ChunkStore | None, ask: AskRequest) -> Collection:
    """Return the collection of the request's chunks. If the engine's settings name no codec, its codec is that of the first chunk
    that this model has KV for."""
    ask, codec = dated(runtime, store, ask), None
    if runtime.config.kv_dtype == "auto" and store is not None:
        manifests = (chunk_of(store, key) for key in ask.keys)
        codec = next((m.codec for m in manifests if m and m.model == runtime.model.fingerprint), None)
    return runtime.collection(ask.salt, codec, wording_of(runtime, ask), ask.day)


def chunk_of(store: ChunkStore, key: bytes) -> ChunkManifest | None:
    """Return the chunk's record, None if it is missing or damaged."""
    try:
        return store.get_chunk(key)
    except BadBlob:
        return None


def inputs_of(
    collection: Collection,
    store: ChunkStore | None,
    keys: Sequence[bytes],
    given: Sequence[PlannedChunk],
    notes: list[str],
) -> tuple[ChunkInput, ...]:
    """Return the chunks as this model sees them, with their documents' names as users see them. given: chunks that the store may
    lack. Raises NotFoundError, UsageError."""
    planned = {chunk.key: chunk for chunk in given}
    citations = None if store is None else Citations(store)
    inputs = list[ChunkInput]()
    for key in keys:
        if key in planned and (store is None or not store.has_chunk(key)):
            inputs.append(_as_missing(collection, planned[key]))
        elif store is None or citations is None:
            raise UsageError("chunks are named, and there is no store", "give --store")
        else:
            manifest = _manifest(store, key)
            found = _as_input(collection, store, manifest, notes)
            inputs.append(replace(found, source=citations.of(manifest).source))
    if citations is not None and citations.damaged:
        notes.append(
            "records of documents are damaged: where their chunks stand in them is not known (cacheblend chunks verify --repair, "
            "then precompute)"
        )
    return tuple(inputs)


def _as_missing(collection: Collection, planned: PlannedChunk) -> ChunkInput:
    """Return a missing chunk, which is computed."""
    ids = planned.chunk.token_ids
    return ChunkInput(collection.key(ids, planned.left), shown(planned.source), ids, planned.left, cached=False)


def _manifest(store: ChunkStore, key: bytes) -> ChunkManifest:
    try:
        manifest = store.get_chunk(key)
    except BadBlob as error:
        raise NotFoundError(
            f"the record of chunk {key.hex()[:12]} is damaged: {error.message}",
            "run cacheblend precompute on its document again",
        ) from error
    if manifest is None:
        raise NotFoundError(f"no chunk {key.hex()[:12]} in the store", "list the ids: cacheblend chunks ls")
    return manifest


def _as_input(collection: Collection, store: ChunkStore, manifest: ChunkManifest, notes: list[str]) -> ChunkInput:
    """A stored chunk as this model sees it.

    One in another codec is loaded in it, and one that the same model computed in another dtype too. One of another model
    or salt gives its text: what this model has of that text in the collection's codec is taken; without any, or with a damaged
    record alone, the chunk is computed. So is a chunk without KV.
    """
    model, stored = collection.model, replace(collection, codec=manifest.codec)
    own = next((c for c in (stored, *stored.in_other_dtypes()) if c.id == manifest.collection), None)
    if own is not None:
        chunk = ChunkInput(
            manifest.key,
            manifest.source,
            manifest.token_ids,
            manifest.left_context_ids,
            cached=manifest.has_kv,
            same_regime=model.decoder.rope.regime(manifest.collected_len) == 0,
            codec=manifest.codec,
            computed_in=own.computed_in,
        )
        return chunk if chunk.cached else to_compute(chunk, collection)
    token_ids = tuple(model.tokenizer.encode_text(manifest.text))
    lefts = dict.fromkeys((manifest.left_context_ids, ()))  # the same context first
    found = [m for left in lefts if (m := chunk_of(store, collection.key(token_ids, left)))]
    if found:
        return _as_input(collection, store, max(found, key=lambda m: m.has_kv), notes)
    notes.append(f"chunk {manifest.id[:12]} has no KV of this model in {collection.codec}: it is computed")
    return ChunkInput(collection.key(token_ids), manifest.source, token_ids, cached=False)


def to_compute(chunk: ChunkInput, collection: Collection) -> ChunkInput:
    """Return the chunk as a missing one. What is computed now is never stored as what another dtype computed."""
    if not chunk.computed_in:
        return replace(chunk, cached=False)
    return ChunkInput(collection.key(chunk.token_ids), chunk.source, chunk.token_ids, cached=False)
