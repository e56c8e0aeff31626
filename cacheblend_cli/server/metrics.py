"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cacheblend_store.tier.shared import SharedTier
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_cli.engine.events import EngineStats
from cacheblend_cli.types import Answer

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_STEP = (1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
_GAUGES = {
    "waiting": "Requests waiting",
    "running": "Requests running",
    "swapped": "Requests swapped out",
    "swap_bytes": "KV of swapped requests in host memory, in bytes",
    "swap_space_bytes": "Host memory for KV of swapped requests (--swap-space), in bytes",
    "host_cache_bytes": "Host memory that keeps KV sent to a GPU (--host-cache), in bytes",
}
_COUNTERS = {
    "finished": "Requests finished",
    "failed": "Requests failed",
    "cancelled": "Requests cancelled or past their deadline",
    "generated": "Generated tokens",
    "proposed": "Tokens computed because prompt lookup proposed them",
    "accepted": "Generated tokens that prompt lookup had proposed",
    "computed": "Prompt tokens with computed KV",
    "reused": "Prompt tokens with stored KV",
    "repaired": "Prompt tokens with recomputed KV",
    "prefix_cached": "Prompt tokens with KV from the prefix cache",
    "preempted": "Preemptions",
    "recomputed": "Preemptions that dropped KV because the swap space was full",
    "host_cache_hits": "Chunks sent to a GPU from the host cache",
    "host_cache_misses": "Chunks sent to a GPU that were not in the host cache",
    "joined": "Short prompts prefilled in one launch with others",
    "split": "Failed launches of several prompts, each of which was then computed alone",
}
_TIER_COUNTERS = {
    "hits": "Chunks without KV in the store, found in the tier",
    "misses": "Chunks without KV in the store, not found in the tier in time",
    "late": "Misses because the tier did not respond in time",
    "failed": "Failed or late requests to the tier",
    "refused": "Tier objects rejected: damaged, or by another writer",
    "rests": "Pauses of the tier after failures",
    "read_bytes": "Bytes read from the tier",
    "puts": "Chunks written to the tier",
    "put_bytes": "Bytes written to the tier",
    "unput": "Chunks that could not be written to the tier",
}


class Metrics(Collector):
    """The server's metrics. stats: called at each scrape. tier: the store's shared tier, None without one."""

    def __init__(self, stats: Callable[[], EngineStats], tier: SharedTier | None = None) -> None:
        self._stats, self._tier, self._registry = stats, tier, CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter(
            "cacheblend_requests", "Requests by route and status", ["route", "status"], registry=self._registry
        )
        self._first = Histogram(
            "cacheblend_ttft_seconds", "Time to first token", buckets=_FIRST, registry=self._registry
        )
        self._each = Histogram(
            "cacheblend_token_seconds", "Time per generated token", buckets=_EACH, registry=self._registry
        )
        self._step = Histogram(
            "cacheblend_tokens_per_step", "Generated tokens per decode step", buckets=_STEP, registry=self._registry
        )
        self._chunks = Counter(
            "cacheblend_chunks", "Prompt chunks by origin of their KV", ["status"], registry=self._registry
        )
        self._loaded = Counter(
            "cacheblend_kv_loaded_bytes", "Bytes of stored KV that were loaded", registry=self._registry
        )

    def request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def answer(self, answer: Answer) -> None:
        if answer.timing.decode_tokens_per_s > 0:
            self._each.observe(1 / answer.timing.decode_tokens_per_s)
            self._step.observe(answer.tokens_per_step)
        for chunk in answer.chunks:
            self._chunks.labels(chunk.status).inc()
        self._loaded.inc(answer.kv_bytes_loaded)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are counted elsewhere."""
        yield from _of_engine(self._stats())
        if self._tier is not None:
            yield from _of_tier(self._tier)


def _of_tier(tier: SharedTier) -> Iterator[Metric]:
    for name, text in _TIER_COUNTERS.items():
        yield CounterMetricFamily(f"cacheblend_tier_{name}", text, value=getattr(tier.counts, name))
    yield CounterMetricFamily("cacheblend_tier_read_seconds", "Total time of reads", value=tier.counts.read_s)
    for name, text, value in (
        ("resting", "1 while the tier is paused after failures", float(tier.resting)),
        ("waiting", "Chunks waiting to be written", float(tier.unput)),
        ("latency_seconds", "Time to look up a chunk", tier.latency_s),
        ("bytes_per_second", "Read throughput of recent prompts' KV", tier.bytes_per_s),
    ):
        yield GaugeMetricFamily(f"cacheblend_tier_{name}", text, value=value)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"cacheblend_{name}", text, value=getattr(stats, name))
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"cacheblend_{name}", text, value=getattr(stats, name))
    yield CounterMetricFamily("cacheblend_stall_seconds", "Time spent waiting for KV to load", value=stats.stall_s)
    blocks = GaugeMetricFamily("cacheblend_blocks", "Blocks of the KV pool by state", labels=["state"])
    for state in ("free", "used", "cached"):
        blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
    yield blocks
    usage = stats.blocks_used / max(1, stats.blocks_free + stats.blocks_used + stats.blocks_cached)
    text = "Share of KV pool blocks held by running requests, 0 to 1"
    yield GaugeMetricFamily("cacheblend_pool_usage_ratio", text, value=usage)
