"""Held-out questions of the demo's model."""

from __future__ import annotations

from cacheblend_cli.demo import heldout_path
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.evaluation.summary import Summary


def spellable_samples() -> list[Sample]:
    """Return the held-out questions whose names the model can spell; it misspells the others with any KV."""
    return [s for s in read_samples(heldout_path()) if s.tags["names"] == "known"]


def accuracy(summary: Summary) -> float:
    """Return the share of answers that match a reference exactly."""
    return summary.exact_match.value if summary.exact_match else 0.0
