"""The demo's table: full prefill, plain reuse and blending on held-out questions, as measured."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine
from cacheblend_cli.demo import heldout_path
from cacheblend_cli.evaluation.evaluate import EvaluateOptions, Progress, evaluate
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.evaluation.settings import FULL, Setting
from cacheblend_cli.evaluation.summary import Summary, summarise

SETTINGS: tuple[Setting, ...] = (
    FULL,
    Setting("reuse, chunks alone", BlendConfig(mode="reuse")),
    Setting("hkvd .15, chunks alone", BlendConfig(ratio=0.15, selector="hkvd")),
    Setting("reuse, in their page", BlendConfig(mode="reuse"), "document"),
    Setting("query .15, in their page", BlendConfig(), "document"),
)
"""CacheBlend as published over chunks that were collected alone, and what `ask` does by default, over chunks collected
behind their page."""
ANSWER_TOKENS = 24


def spellable_samples() -> list[Sample]:
    """The held-out questions whose names the model can spell: the others it misspells, whatever the KV."""
    return [s for s in read_samples(heldout_path()) if s.tags["names"] == "known"]


def demo_samples(count: int) -> list[Sample]:
    """`count` held-out questions, spread evenly over those whose names the model can spell."""
    samples = spellable_samples()
    step = max(1, len(samples) // count)
    return samples[::step][:count]


def demo_table(engine: Engine, store: ChunkStore, samples: Sequence[Sample], on_progress: Progress) -> list[Summary]:
    """Measure every setting on the samples."""
    results = evaluate(engine, store, samples, SETTINGS, EvaluateOptions(ANSWER_TOKENS), on_progress=on_progress)
    return summarise(results)


def accuracy(summary: Summary) -> float:
    """Share of answers that match a reference exactly."""
    return summary.exact_match.value if summary.exact_match else 0.0


def gap_closed(summaries: Sequence[Summary], index: int) -> float | None:
    """Share of the gap between reuse (the second) and full prefill (the first) that setting `index` closes."""
    gap = accuracy(summaries[0]) - accuracy(summaries[1])
    return (accuracy(summaries[index]) - accuracy(summaries[1])) / gap if gap > 0 else None
