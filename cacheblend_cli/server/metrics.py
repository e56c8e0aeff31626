"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cacheblend_store.tier.shared import SharedTier
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_cli.engine.events import EngineStats
from cacheblend_cli.types import Answer

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_GAUGES = {
    "waiting": "Questions that wait",
    "running": "Questions that are answered",
    "swapped": "Answers that were put aside",
    "swap_bytes": "KV of such answers in the host's memory",
    "swap_space_bytes": "The host's memory that such KV may take (--swap-space)",
}
_COUNTERS = {
    "finished": "Questions that were answered",
    "failed": "Questions that could not be answered",
    "cancelled": "Questions that were cancelled or too late",
    "generated": "Tokens of answers",
    "computed": "Tokens of prompts whose KV was computed",
    "reused": "Tokens of prompts whose KV was stored",
    "repaired": "Tokens of prompts whose stored KV was computed again",
    "prefix_cached": "Tokens of prompts whose KV was in the prefix cache",
    "preempted": "Answers that had to give up their blocks",
    "recomputed": "Answers of these whose KV was dropped, as the swap space was full",
    "joined": "Short prompts that were computed in one launch with others",
}
_OF_TIER = {
    "hits": "Chunks without KV in the store that the tier had",
    "misses": "Chunks without KV in the store that the tier had not, or did not tell in time",
    "late": "Chunks of these that it did not tell in time",
    "failed": "Failed or late requests to the tier",
    "refused": "Objects of the tier that were damaged or another writer's",
    "rests": "Times that the tier was left alone after failures",
    "read_bytes": "Bytes read from the tier",
    "puts": "Chunks put into the tier",
    "put_bytes": "Bytes put into the tier",
    "unput": "Chunks that could not be put into the tier",
}


class Metrics:
    """stats: asked whenever somebody reads. tier: the store's, None without one."""

    def __init__(self, stats: Callable[[], EngineStats], tier: SharedTier | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stats(stats))
        if tier is not None:
            self._registry.register(_Tier(tier))
        self._requests = Counter(
            "cacheblend_requests", "Requests by route and status", ["route", "status"], registry=self._registry
        )
        self._first = Histogram(
            "cacheblend_ttft_seconds", "From a request to its first token", buckets=_FIRST, registry=self._registry
        )
        self._each = Histogram(
            "cacheblend_token_seconds", "Between two tokens of an answer", buckets=_EACH, registry=self._registry
        )
        self._chunks = Counter(
            "cacheblend_chunks", "Chunks of prompts by how their KV came to be", ["status"], registry=self._registry
        )
        self._loaded = Counter("cacheblend_kv_loaded_bytes", "KV read from the store", registry=self._registry)

    def request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def answer(self, answer: Answer) -> None:
        """An answer has ended."""
        if answer.timing.decode_tokens_per_s > 0:
            self._each.observe(1 / answer.timing.decode_tokens_per_s)
        for chunk in answer.chunks:
            self._chunks.labels(chunk.status).inc()
        self._loaded.inc(answer.kv_bytes_loaded)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Tier(Collector):
    """Collector of the shared tier's counters."""

    def __init__(self, tier: SharedTier) -> None:
        self._tier = tier

    def collect(self) -> Iterable[Metric]:
        counts = self._tier.counts
        for name, text in _OF_TIER.items():
            yield CounterMetricFamily(f"cacheblend_tier_{name}", text, value=getattr(counts, name))
        yield CounterMetricFamily("cacheblend_tier_read_seconds", "Seconds of reads, added up", value=counts.read_s)
        for name, text, value in (
            ("resting", "1 while the tier is left alone after failures", float(self._tier.resting)),
            ("waiting", "Chunks that wait to be put", float(self._tier.unput)),
            ("latency_seconds", "Time to find out whether a chunk is there", self._tier.latency_s),
            ("bytes_per_second", "Bytes a second of the latest prompts' KV", self._tier.bytes_per_s),
        ):
            yield GaugeMetricFamily(f"cacheblend_tier_{name}", text, value=value)


class _Stats(Collector):
    """Collector of the engine's counters."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"cacheblend_{name}", help_text, value=getattr(stats, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"cacheblend_{name}", help_text, value=getattr(stats, name))
        yield CounterMetricFamily("cacheblend_stall_seconds", "Waited for KV to load", value=stats.stall_s)
        blocks = GaugeMetricFamily("cacheblend_blocks", "Blocks of the KV pool by state", labels=["state"])
        for state in ("free", "used", "cached"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        blocks_all = stats.blocks_free + stats.blocks_used + stats.blocks_cached
        usage = GaugeMetricFamily(
            "cacheblend_pool_usage_ratio", "Share of the KV pool's blocks that running answers hold, 0 to 1"
        )
        usage.add_metric([], stats.blocks_used / blocks_all if blocks_all else 0.0)
        yield usage
