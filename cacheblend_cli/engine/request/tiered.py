"""Missing chunks of a request: ask the tier for them, and limit the wait."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from cacheblend_store import ChunkManifest, ChunkStore
from cacheblend_store.tier.shared import SharedTier

from cacheblend_cli import user_cache
from cacheblend_cli.blend.cost import estimate_full
from cacheblend_cli.blend.speeds import kv_share, read_speeds, speed_file
from cacheblend_cli.collect.collector import PlannedChunk, chunk_manifest, prefix_chunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.tiered_source import TieredSource
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.types import Workload

_FASTEST = {"cpu": 2e12, "cuda": 1e15}
"""FLOP/s that no device exceeds, for machines without measured speeds."""


def with_tier(request: Request, store: ChunkStore, tier: SharedTier) -> Request:
    """Return the request with the chunks that only the tier has, unchanged if none is missing. The longest wait for
    their KV is the time of a full prefill."""
    collection, chunks = request.collection, request.inputs
    missing = (c for c in chunks if not c.cached and c.key == collection.key(c.token_ids, c.left_context_ids))
    wanted = [_expected(collection, c) for c in missing]
    if collection.prefix_ids and not request.prefix_cached:
        wanted.append(chunk_manifest(collection, prefix_chunk(collection)))
    if not wanted:
        return request
    if not collection.decoder.part.is_whole:
        raise UsageError(
            "--tier is not implemented with --tensor-parallel", "fetch the chunks first: cacheblend chunks pull"
        )
    _recall_speed(tier)
    num_tokens = len(collection.prefix_ids) + sum(len(c.token_ids) for c in chunks) + len(request.suffix_ids)
    tiered = TieredSource(store, tier, wanted, full_prefill_s(collection, num_tokens))
    found = set(tiered.found)
    return replace(
        request,
        tiered=tiered,
        prefix_cached=request.prefix_cached or collection.prefix_key in found,
        chunks=tuple(
            replace(c, input=_found(c.input, collection)) if c.input.key in found and not c.input.cached else c
            for c in request.chunks
        ),
    )


def _found(chunk: ChunkInput, collection: Collection) -> ChunkInput:
    """Return a chunk of the tier as one with stored KV."""
    collected_len = len(collection.prefix_ids) + len(chunk.left_context_ids) + len(chunk.token_ids)
    decoder = collection.decoder
    regular, has_state = decoder.rope.regime(collected_len) == 0, decoder.state_layout is not None
    return replace(chunk, cached=True, codec=collection.codec, same_regime=regular, has_state=has_state)


def full_prefill_s(collection: Collection, num_tokens: int) -> float:
    """Estimate the seconds of a full prefill from this machine's measured speeds, or else for the fastest device."""
    decoder, spec = collection.decoder, collection.model.spec
    speeds = read_speeds(speed_file(collection.model.loaded, collection.codec))
    if speeds is None:
        return 2.0 * decoder.num_parameters * num_tokens / _FASTEST.get(decoder.device.type, _FASTEST["cuda"])
    work = Workload(spec.num_layers, num_tokens, 0, 0.0, num_tokens, num_tokens / 2, 0, kv_share(spec))
    return estimate_full(speeds, work).prefill_s


def remember_speed(tier: SharedTier) -> None:
    if tier.latency_s and tier.bytes_per_s:
        record = {"latency_s": tier.latency_s, "bytes_per_s": tier.bytes_per_s}
        user_cache.keep(user_cache.place("tier", tier.tier.url), json.dumps(record))


def _recall_speed(tier: SharedTier) -> None:
    if tier.latency_s and tier.bytes_per_s:
        return
    with suppress(ValueError, KeyError, TypeError):
        known = json.loads(user_cache.recall(user_cache.place("tier", tier.tier.url)))
        tier.latency_s = tier.latency_s or max(0.0, float(known["latency_s"]))
        tier.bytes_per_s = tier.bytes_per_s or max(0.0, float(known["bytes_per_s"]))


def _expected(collection: Collection, chunk: ChunkInput) -> ChunkManifest:
    planned = PlannedChunk(chunk.key, chunk.source, Chunk(0, "", chunk.token_ids, 0, 0), chunk.left_context_ids, "sink")
    return chunk_manifest(collection, planned)
