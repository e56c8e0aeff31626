"""Estimate how long collecting chunks takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cacheblend_cli.collect.collector import Collector
from cacheblend_cli.collect.plan import ChunkSizes
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens
from cacheblend_cli.prompt.collection import Collection


def estimate_seconds(missing: Sequence[tuple[Collection, ChunkSizes]]) -> float:
    """Return the seconds that collecting these chunks takes, from a measured prefill of one pack in one sequence."""
    total = 0.0
    for collection, sizes in missing:
        if sizes:
            tokens = prefill_tokens(sizes)
            total += _seconds_per_token(collection, tokens) * tokens
    return total


def prefill_tokens(sizes: ChunkSizes) -> int:
    """Return the tokens to prefill: chunks, and their left contexts except where a chunk follows the one before it."""
    total, end = 0, 0
    for size in sizes:
        total += size.num_tokens + (0 if size.left_len == end else size.left_len)
        end = size.left_len + size.num_tokens
    return total


def _seconds_per_token(collection: Collection, tokens: int) -> float:
    decoder, prefix = collection.model.decoder, Collector(collection).prefix
    size = max(1, collection.window(min(pack_tokens(decoder.device), tokens)))
    probe, best = CollectSequence((0,) * size, (Kept(b"", 0, size),)), float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for _ in collect(decoder, prefix, [probe]):
            pass
        best = min(best, time.perf_counter() - start)
    return best / size
