"""Chunks of the store after an answer: used ones are marked, and missing ones, which the tier had or which were
computed with the prompt, are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.collect.collector import Collector, PlannedChunk, prefix_chunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.events import OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.types import Answer


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, None if request.store is None or request.blend.mode == "full" else KeptChunks(request.store)


class KeptChunks(Hook):
    """Updates the store with the chunks of a request, and reports the use of its tier."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def on_answers(self, report: PrefillReport, made: Sequence[tuple[Generation, Answer]]) -> None:
        for _, answer in made:
            answer.tier = None if report.request.tiered is None else report.request.tiered.use

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> Iterator[None] | None:
        request = report.request
        if request.tiered is not None and self._store.tier is not None:
            from cacheblend_cli.engine.request.tiered import remember_speed

            remember_speed(self._store.tier)
        used = [s.key for s in report.plan.chunks if s.cached and s.key]
        # before missing chunks are stored, which may need room
        self._store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)
        missing = {s.key for s in report.plan.chunks if s.key and s.status == "computed"}
        if not (request.options.save and self._store.writable) or not (missing or request.tiered):
            return None
        return _store_missing(report, self._store, missing)


def _store_missing(done: PrefillReport, store: ChunkStore, missing: Set[bytes]) -> Iterator[None]:
    """Store chunks from the tier, then collect and store computed ones, at most one launch between two values. A note
    reports the result."""
    request = done.request
    keep = {s.key for s in done.plan.chunks if s.key} | {request.collection.prefix_key}
    collector = Collector(request.collection, store, keep)
    yield from _store_taken(done, store, collector)
    if not missing:
        return
    what = f"the KV of {len(missing)} computed chunk{'s' if len(missing) > 1 else ''}"
    try:
        # one by one: other answers continue between two chunks
        for _ in collector.store(_planned(done, store, missing), again=True, every_s=0.0):
            yield
        request.notes.append(f"stored {what}")
    except (StoreError, DeviceError) as error:  # the answer does not need it
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
        elif (known := of.manifest) is not None and store.has_chunk(
            known.key
        ):  # else it went while the answer was made
            own = known.key == segment.key
            left, context = (known.left_context_ids, known.context) if own else ((), "sink")
            chunk = Chunk(known.index, known.text, segment.token_ids, *known.span)
            planned[segment.key] = PlannedChunk(segment.key, known.source, chunk, left, context)
    return list(planned.values())
