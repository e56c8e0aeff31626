"""Paired bootstrap intervals: samples are drawn with replacement, with the same draws for all settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
"""One number per sample: [num_samples], or [num_resamples, num_samples]."""
_TAILS = (2.5, 97.5)  # percent: 95 % lie between them


@dataclass(frozen=True)
class Interval:
    """A statistic and the 95 % percentile interval of its resamples."""

    value: float
    low: float
    high: float


class Bootstrap:
    """Resamples of num_samples samples (Efron, 1979), the same ones for every statistic."""

    def __init__(self, num_samples: int, resamples: int = 2000, seed: int = 0) -> None:
        self._draws = np.random.default_rng(seed).integers(0, max(1, num_samples), (resamples, num_samples))

    def interval(self, statistic: Callable[..., Column], *columns: Sequence[float]) -> Interval | None:
        """Return the statistic over columns of one number per sample, with its interval; statistic works along the last
        axis. None if it is not a number (no samples, or division by zero)."""
        data = [np.asarray(c, dtype=np.float64) for c in columns]
        if not len(data[0]):
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(*data))
            drawn = statistic(*(d[self._draws] for d in data))
        drawn = drawn[np.isfinite(drawn)]
        if not np.isfinite(value) or not len(drawn):
            return None
        low, high = np.percentile(drawn, _TAILS)
        return Interval(value, float(low), float(high))


def mean(column: Column) -> Column:
    return column.mean(-1)


def difference(ours: Column, theirs: Column) -> Column:
    return ours.mean(-1) - theirs.mean(-1)


def pooled(part: Column, whole: Column) -> Column:
    """Return a share over all samples together: sum of parts divided by sum of wholes."""
    return part.sum(-1) / whole.sum(-1)


def normalised(ours: Column, reuse: Column, full: Column) -> Column:
    """Return (score - reuse) / (full - reuse): 0 is plain reuse, 1 is full prefill (NormF1)."""
    return (ours.mean(-1) - reuse.mean(-1)) / (full.mean(-1) - reuse.mean(-1))
