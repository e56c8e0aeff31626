"""Estimate the time to collect chunks on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cacheblend_cli.collect.collector import Collector
from cacheblend_cli.collect.difference import Missing
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens
from cacheblend_cli.prompt.collection import Collection


def estimate_seconds(missing: Sequence[Missing]) -> float:
    """Estimate the seconds to collect these chunks, from a measured prefill of one sequence as long as a pack."""
    tokens = [(of.collection, of.prefill_tokens) for of in missing if of.chunks]
    return sum(_seconds_per_token(collection, count) * count for collection, count in tokens)


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
