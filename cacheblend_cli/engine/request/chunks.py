"""Chunks of a request as its model sees them, and the wording of the template around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cacheblend_store import ChunkManifest, ChunkStore

from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.request.request import RequestChunk, to_compute
from cacheblend_cli.engine.request.stored_chunks import StoredChunks
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import PLAIN, AskRequest


def dated(prompts: Prompts, store: ChunkStore | None, ask: AskRequest) -> AskRequest:
    """Return the request with its date, so that all of its preparation reads the same template."""
    return ask if ask.day is not None else replace(ask, day=prompts.day(store, ask.salt))


def wording_of(prompts: Prompts, ask: AskRequest) -> Wording:
    """Return the engine's wording with the request's own prompts."""
    own = prompts.template.wording
    if ask.raw:
        return Wording(PLAIN, raw=True)
    system = own.system if ask.system is None else ask.system.strip()
    return replace(own, prompt=ask.prompt or own.prompt, system=system)


def in_stored_codec(
    collection: Collection, prompts: Prompts, stored: StoredChunks, keys: Sequence[bytes]
) -> Collection:
    """Return the collection in the codec of the first of the chunks that this model has KV for, if the engine's
    settings name none."""
    if prompts.config.kv_dtype != "auto":
        return collection
    own = (m for m in map(stored.get, keys) if m is not None and m.model == prompts.model.fingerprint)
    first = next(own, None)
    return collection if first is None else collection.in_codec(first.codec)


def request_chunks(
    collection: Collection,
    stored: StoredChunks,
    keys: Sequence[bytes],
    planned: Mapping[bytes, PlannedChunk],
    ranks: Mapping[bytes, int],
    notes: list[str],
) -> tuple[RequestChunk, ...]:
    """Return the chunks as this model sees them. planned: chunks of the request's documents, which the store may lack.
    Raises NotFoundError."""
    found = []
    for key in keys:
        new = planned.get(key)
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
            "records of documents are damaged: where their chunks stand in them is not known (cacheblend chunks verify --repair, "
            "then precompute)"
        )
    return tuple(found)


def check_named(store: ChunkStore | None, keys: Sequence[bytes], planned: Mapping[bytes, PlannedChunk]) -> None:
    """Raise UsageError for named chunks without a store."""
    if store is None and any(key not in planned for key in keys):
        raise UsageError("chunks are named, and there is no store", "give --store")


def _as_input(
    collection: Collection, stored: StoredChunks, manifest: ChunkManifest, notes: list[str]
) -> tuple[ChunkInput, ChunkManifest]:
    """Return a stored chunk as this model sees it, and the record that says so.

    One in another codec is loaded in it, and one that the same model computed in another dtype too. One of another
    model or salt gives its text: what this model has of that text in the collection's codec is taken; without any, or
    with a damaged record alone, the chunk is computed. So is a chunk without KV.
    """
    model, same = collection.model, replace(collection, codec=manifest.codec)
    own = next((c for c in (same, *same.in_other_dtypes()) if c.id == manifest.collection), None)
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
        return (chunk if chunk.cached else to_compute(chunk, collection)), manifest
    token_ids = tuple(model.tokenizer.encode_text(manifest.text))
    lefts = dict.fromkeys((manifest.left_context_ids, ()))  # the same context first
    found = [m for left in lefts if (m := stored.get(collection.key(token_ids, left)))]
    if found:
        return _as_input(collection, stored, max(found, key=lambda m: m.has_kv), notes)
    notes.append(f"chunk {manifest.id[:12]} has no KV of this model in {collection.codec}: it is computed")
    return ChunkInput(collection.key(token_ids), manifest.source, token_ids, cached=False), manifest
