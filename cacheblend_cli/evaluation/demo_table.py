"""The demo's table: full prefill, plain reuse and blending on held-out questions, as measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine
from cacheblend_cli.demo import heldout_path
from cacheblend_cli.evaluation.heldout import Sample, Score, read_samples, score, store_texts

SETTINGS: tuple[tuple[str, BlendConfig], ...] = (
    ("full prefill", BlendConfig(mode="full")),
    ("reuse, no repair", BlendConfig(mode="reuse")),
    ("blend .05", BlendConfig(ratio=0.05)),
    ("blend .15", BlendConfig(ratio=0.15)),
    ("blend .30", BlendConfig(ratio=0.30)),
)


def demo_samples(count: int) -> list[Sample]:
    """`count` held-out questions, spread evenly over those whose names the model can spell."""
    samples = [s for s in read_samples(heldout_path()) if s.tags.get("names") == "known"]
    step = max(1, len(samples) // count)
    return samples[::step][:count]


def demo_table(
    engine: Engine, store: ChunkStore, samples: Sequence[Sample], on_sample: Callable[[], None] = lambda: None
) -> list[Score]:
    """Store the samples' chunks and score every setting on them."""
    keys = store_texts(engine, store, [text for sample in samples for text in sample.texts])
    return score(engine, store, samples, keys, SETTINGS, on_sample)


def gap_closed(scores: Sequence[Score], index: int) -> float | None:
    """Share of the gap between reuse (scores[1]) and full prefill (scores[0]) that setting `index` closes."""
    gap = scores[0].accuracy - scores[1].accuracy
    return (scores[index].accuracy - scores[1].accuracy) / gap if gap > 0 else None
