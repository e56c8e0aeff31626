"""The demo's table: full prefill, plain reuse and blending on held-out questions, as measured."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine
from cacheblend_cli.demo import heldout_path
from cacheblend_cli.evaluation.evaluate import FULL, Progress, evaluate
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import Summary, summarise

SETTINGS: tuple[Setting, ...] = (
    FULL,
    Setting("reuse, no repair", BlendConfig(mode="reuse")),
    Setting("blend .05", BlendConfig(ratio=0.05)),
    Setting("blend .15", BlendConfig(ratio=0.15)),
    Setting("blend .30", BlendConfig(ratio=0.30)),
)
ANSWER_TOKENS = 24


def demo_samples(count: int) -> list[Sample]:
    """`count` held-out questions, spread evenly over those whose names the model can spell."""
    samples = [s for s in read_samples(heldout_path()) if s.tags.get("names") == "known"]
    step = max(1, len(samples) // count)
    return samples[::step][:count]


def demo_table(engine: Engine, store: ChunkStore, samples: Sequence[Sample], on_progress: Progress) -> list[Summary]:
    """Measure every setting on the samples."""
    results = evaluate(engine, store, samples, SETTINGS, max_tokens=ANSWER_TOKENS, on_progress=on_progress)
    return summarise(results)


def accuracy(summary: Summary) -> float:
    """Share of answers that match a reference exactly."""
    return summary.exact_match.value if summary.exact_match else 0.0


def gap_closed(summaries: Sequence[Summary], index: int) -> float | None:
    """Share of the gap between reuse (the second) and full prefill (the first) that setting `index` closes."""
    gap = accuracy(summaries[0]) - accuracy(summaries[1])
    return (accuracy(summaries[index]) - accuracy(summaries[1])) / gap if gap > 0 else None
