"""Holes: chunks an answer had to compute, missing ones and ones whose KV was bad. They are stored after it."""

from __future__ import annotations

from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.prefill import Prefilled
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.prompt.dates import keep_date
from cacheblend_cli.prompt.kept import keep_wording


def store_holes(done: Prefilled) -> None:
    """Collect and store the prompt's computed chunks, where its store is open for writing; a note says how it went."""
    request, store = done.request, done.request.store
    if store is None or not store.writable or request.blend.mode == "full":
        return
    count = len({s.key for s in done.plan.chunks if s.status == "computed"})
    if not count:
        return
    told = f"the KV of {count} computed chunk{'s' if count > 1 else ''}"
    try:
        keep_date(store, request.collection)
        keep_wording(store, request.collection)
        keep = {s.key for s in done.plan.chunks if s.key} | {request.collection.prefix_key}
        collector = Collector(request.collection, store, keep)
        planned = _planned(done, store)
        for own, kv in zip(planned, collector.collect(planned), strict=True):
            collector.put(own, kv)
        request.notes.append(f"stored {told}")
    except (StoreError, DeviceError) as error:  # the answer is there, and stands without
        request.notes.append(f"{told} could not be stored: {error.message}")


def _planned(done: Prefilled, store: ChunkStore) -> list[PlannedChunk]:
    """The computed chunks, each once. For a chunk of another model, its text and its place in its document are found
    under the key the question came with."""
    planned: dict[bytes, PlannedChunk] = {}
    for segment, name in zip(done.plan.chunks, done.request.named, strict=True):
        if segment.status != "computed" or segment.key is None or segment.key in planned:
            continue
        own = store.get_chunk(segment.key)
        known = own or store.get_chunk(name)
        if known is None:  # it went while the answer was made
            continue
        left, context = (own.left_context_ids, own.context) if own else ((), "sink")
        chunk = Chunk(known.index, known.text, segment.token_ids, *known.span)
        planned[segment.key] = PlannedChunk(segment.key, known.source, chunk, left, context)
    return list(planned.values())
