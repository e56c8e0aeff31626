"""Intervals: seeded, paired, and about the right width."""

from __future__ import annotations

import math

import numpy as np

from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean, normalised, pooled


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation() -> None:
    data = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = Bootstrap(400, seed=7).interval(mean, data)
    assert found is not None
    half = 1.96 * data.std() / math.sqrt(400)
    assert found.value == data.mean()
    assert abs((found.high - found.low) / 2 - half) < 0.1 * half


def test_pairing_takes_out_what_both_share() -> None:
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 10, 300)
    ours, theirs = hard + 1 + rng.normal(0, 0.1, 300), hard
    found = Bootstrap(300).interval(difference, ours, theirs)
    assert found is not None
    assert 0.95 < found.low < found.value < found.high < 1.05


def test_the_same_seed_gives_the_same_interval() -> None:
    data = np.random.default_rng(0).normal(size=50)
    a, b, c = (Bootstrap(50, 200, seed).interval(mean, data) for seed in (3, 3, 4))
    assert a == b
    assert a != c


def test_shares_of_all_samples_together() -> None:
    found = Bootstrap(2, 50).interval(pooled, [1.0, 9.0], [10.0, 10.0])
    assert found is not None
    assert found.value == 0.5


def test_normalised_is_0_for_reuse_1_for_full_and_undefined_without_a_gap() -> None:
    reuse, full = [0.0, 0.2, 0.4] * 20, [0.5, 0.9, 1.0] * 20
    bootstrap = Bootstrap(60)
    values = [bootstrap.interval(normalised, ours, reuse, full) for ours in (reuse, full)]
    assert [v.value for v in values if v] == [0.0, 1.0]
    assert bootstrap.interval(normalised, full, full, full) is None
    assert Bootstrap(0).interval(mean, []) is None
