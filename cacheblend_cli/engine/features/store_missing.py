"""Store missing chunks after an answer: chunks from the tier, and chunks computed with the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.collect.collector import Collector, PlannedChunk, prefix_chunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.errors import DeviceError


def store_missing(done: PrefillReport, store: ChunkStore, missing: Set[bytes]) -> Iterator[None]:
    """Store chunks from the tier, then compute and store the other missing chunks, at most one launch between two
    values. A note reports an error."""
    request = done.request
    keep = {s.key for s in done.plan.chunks if s.key} | {request.collection.prefix_key}
    collector = Collector(request.collection, store, keep)
    yield from _store_taken(done, store, collector)
    if not missing:
        return
    try:
        # one by one: other answers continue between two chunks
        for _ in collector.store(_planned(done, store, missing), again=True, every_s=0.0):
            yield
    except (StoreError, DeviceError) as error:  # the answer does not need it
        what = f"the KV of {len(missing)} computed chunk{'s' if len(missing) > 1 else ''}"
        request.notes.append(f"{what} could not be stored: {error.message}")


def _store_taken(done: PrefillReport, store: ChunkStore, collector: Collector) -> Iterator[None]:
    """Store KV that came from the tier, one chunk between two values."""
    request, tiered = done.request, done.request.tiered
    if tiered is None:
        return
    collection, taken = request.collection, tiered.found
    planned = _planned(done, store, taken)
    if collection.prefix_key in taken:
        planned.append(prefix_chunk(collection))
    try:
        for chunk in planned:
            if not store.has_kv(chunk.key) and (blobs := tiered.blobs(chunk.key)) is not None:
                collector.put_blobs(chunk, blobs)
                yield
    except StoreError as error:
        request.notes.append(f"KV from the tier could not be stored: {error.message}")


def _planned(done: PrefillReport, store: ChunkStore, keys: Set[bytes]) -> list[PlannedChunk]:
    """Return the prompt's chunks with these keys, each once. Text and place come from the request's document, or from
    the record that the chunk was resolved to, which can be another model's."""
    planned: dict[bytes, PlannedChunk] = {}
    for segment, of in zip(done.plan.chunks, done.request.chunks, strict=True):
        if segment.key is None or segment.key not in keys or segment.key in planned:
            continue
        if of.planned is not None:
            planned[segment.key] = replace(of.planned, key=segment.key)
        elif (known := of.manifest) is not None and store.has_chunk(known.key):  # else it went meanwhile
            own = known.key == segment.key
            left, context = (known.left_context_ids, known.context) if own else ((), "sink")
            chunk = Chunk(known.index, known.text, segment.token_ids, *known.span)
            keeps_state = bool(known.state) or not own
            planned[segment.key] = PlannedChunk(segment.key, known.source, chunk, left, context, keeps_state)
    return list(planned.values())
