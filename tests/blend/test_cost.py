"""The loading controller's decision: a pure function, over the cases that matter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.blend.cost import (
    at_ratio,
    decide,
    estimate,
    estimate_full,
    free_ratio,
    learn,
    or_full,
)
from cacheblend_cli.types import Speeds, Workload

NOTHING = (0, 0.0)  # loaded
SPEEDS = Speeds(layer_s=1e-4, row_s=1e-5, pair_s=1e-9, head_s=1e-4, bytes_per_s=1e9)
WORK = Workload(
    num_layers=24, total=4096, inexact=3000, inexact_keys=2500, fresh=64, fresh_keys=4064, kv_bytes=24 * 4_000_000,
    kv_share=0.1,
)  # fmt: skip


def loading_a_layer_in(seconds: float, work: Workload = WORK) -> Speeds:
    return replace(SPEEDS, bytes_per_s=work.kv_bytes / work.num_layers / seconds)


def test_loading_in_no_time_leaves_the_floor() -> None:
    for speed in (math.inf, 1e15):
        found = decide(replace(SPEEDS, bytes_per_s=speed), WORK, 0.15)
        assert (found.mode, found.ratio) == ("blend", 0.15)
        assert found.chosen.stall_s < 1e-6
        assert found.layer_compute_s > found.layer_load_s


def test_slow_loading_ends_in_a_full_prefill() -> None:
    found = decide(loading_a_layer_in(10.0), WORK, 0.15)
    assert (found.mode, found.ratio) == ("full", 1.0)
    assert found.chosen == found.full
    assert found.chosen.load_s == 0


def test_between_them_a_layers_recompute_just_hides_under_the_next_ones_loading() -> None:
    found = decide(loading_a_layer_in(0.02), WORK, 0.15)
    assert found.mode == "blend"
    assert 0.15 < found.ratio < 1
    assert found.layer_compute_s == pytest.approx(found.layer_load_s, rel=1e-3)
    more = estimate(loading_a_layer_in(0.02), WORK, min(1.0, found.ratio * 1.2))
    assert more.prefill_s > found.chosen.prefill_s + 0.1 * found.layer_load_s  # more is not free
    least = estimate(loading_a_layer_in(0.02), WORK, 0.15)
    assert found.chosen.prefill_s < least.prefill_s + found.layer_load_s  # and up to there it was


def test_the_floor_is_kept_though_it_does_not_hide() -> None:
    speeds = loading_a_layer_in(0.002)
    assert 0 < free_ratio(speeds, WORK) < 0.15
    assert decide(speeds, WORK, 0.15).ratio == 0.15
    assert decide(speeds, WORK, 0.0).ratio == free_ratio(speeds, WORK)
    assert decide(speeds, WORK, 0.4).ratio == 0.4


def test_slower_loading_never_means_less_repair() -> None:
    ratios = [decide(loading_a_layer_in(10 ** (e / 8)), WORK, 0.15).ratio for e in range(-40, 8)]
    assert ratios == sorted(ratios)
    assert ratios[0] == 0.15
    assert ratios[-1] == 1.0
    assert len(set(ratios)) > 5


def test_without_a_reusable_token_there_is_nothing_to_decide() -> None:
    nothing = replace(WORK, inexact=0, inexact_keys=0, fresh=4096, fresh_keys=2048.5, kv_bytes=0)
    found = decide(SPEEDS, nothing, 0.15)
    assert (found.mode, found.ratio) == ("blend", 0.15)  # blend, so that what was computed is stored
    assert found.chosen.prefill_s == pytest.approx(found.full.prefill_s)
    exact = replace(WORK, inexact=0, inexact_keys=0)
    found = decide(SPEEDS, exact, 0.15)
    assert (found.mode, found.ratio) == ("blend", 0.15)
    assert decide(loading_a_layer_in(10.0), exact, 0.15).mode == "full"


def test_full_prefills_with_other_speeds_are_compared() -> None:
    slower, faster = (replace(SPEEDS, row_s=SPEEDS.row_s * x, pair_s=SPEEDS.pair_s * x) for x in (10.0, 0.01))
    assert decide(SPEEDS, WORK, 0.15, slower).mode == "blend"
    found = decide(SPEEDS, WORK, 0.15, faster)
    assert (found.mode, found.ratio, found.chosen) == ("full", 1.0, estimate_full(faster, WORK))
    given = at_ratio(SPEEDS, WORK, 0.3, 0.3, faster)
    assert (given.mode, given.ratio, given.full) == ("blend", 0.3, found.full)
    assert or_full(given, WORK, faster) == replace(found, floor=0.3)
    assert or_full(at_ratio(SPEEDS, WORK, 0.3, 0.3, slower), WORK, slower).mode == "blend"


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_tiny_prompt(layers: int) -> None:
    tiny = Workload(layers, 3, 1, 2, 1, 3, layers * 64, 0.1)
    for speed in (1.0, 1e3, 1e6, math.inf):
        found = decide(replace(SPEEDS, bytes_per_s=speed), tiny, 0.15)
        assert 0.15 <= found.ratio <= 1
        assert found.chosen.prefill_s <= found.full.prefill_s
    assert decide(replace(SPEEDS, bytes_per_s=1.0), tiny, 0.15).mode == "full"


def test_a_selector_without_a_check_layer_costs_less() -> None:
    for ratio in (0.05, 0.15, 0.5):
        without = estimate(SPEEDS, replace(WORK, check_layer=0), ratio)
        first = estimate(SPEEDS, WORK, ratio)
        third = estimate(SPEEDS, replace(WORK, check_layer=3), ratio)
        assert without.compute_s < first.compute_s < third.compute_s
    for ratio in (0.0, 1.0):  # nothing to choose: no layer is spent on checking
        assert estimate(SPEEDS, WORK, ratio) == estimate(SPEEDS, replace(WORK, check_layer=0), ratio)
    stale = estimate(SPEEDS, replace(WORK, layer0_exact=False), 0.15)
    assert stale.compute_s > estimate(SPEEDS, WORK, 0.15).compute_s


def test_a_probe_waits_for_its_layers_and_costs_a_pass_of_the_fresh_rows() -> None:
    """By hand: 4 layers of 10 s of loading, 1 s a row; 2 fresh rows, 10 inexact. A layer of the probe takes 2 s."""
    speeds = Speeds(layer_s=0.0, row_s=1.0, pair_s=0.0, head_s=0.0, bytes_per_s=1.0)
    work = Workload(4, 12, 10, 5, 2, 12, kv_bytes=40, kv_share=0.0, check_layer=0, layer0_exact=False)
    plain, probed = estimate(speeds, work, 0.2), estimate(speeds, replace(work, probe_layers=2), 0.2)
    # 4 rows a layer, one in the last: each layer but the last is done before the KV of the next is there
    assert (plain.prefill_s, plain.compute_s) == (41, 13)
    # the probe ends at 10 + 10 + 2 = 22; then layer 0 to 26, 1 to 30, 2 to 34, and layer 3 waits until 40
    assert (probed.prefill_s, probed.compute_s, probed.stall_s) == (41, 17, 24)
    # room of a layer: 10 s without a probe; with it the 40 - 22 s that are left, over 4 layers; 2 s are the fresh rows'
    assert free_ratio(speeds, work) == pytest.approx(8 / 10)
    assert free_ratio(speeds, replace(work, probe_layers=2)) == pytest.approx((18 / 4 - 2) / 10)
    assert free_ratio(speeds, replace(work, probe_layers=4)) == 0
    for ratio in (0.0, 1.0):  # nothing to choose, so nobody looks
        assert estimate(speeds, work, ratio) == estimate(speeds, replace(work, probe_layers=2), ratio)


def test_a_correction_is_charged_for_every_row_it_moves() -> None:
    """By hand: 4 layers without loading, 1 s a row, .5 s a row that is moved; 2 fresh rows, 10 inexact, 2 of them
    chosen."""
    speeds = Speeds(layer_s=0.0, row_s=1.0, pair_s=0.0, head_s=0.0, moved_s=0.5)
    work = Workload(4, 12, 10, 5, 2, 12, kv_bytes=40, kv_share=0.0, check_layer=0, layer0_exact=False)
    moved = replace(work, corrected=True)
    assert estimate(speeds, moved, 0.2).compute_s == estimate(speeds, work, 0.2).compute_s + 3 * 8 * 0.5, (
        "not in layer 0"
    )
    late, late_moved = (replace(w, check_layer=2) for w in (work, moved))
    assert estimate(speeds, late_moved, 0.2).compute_s == estimate(speeds, late, 0.2).compute_s + 8 * 0.5
    for ratio in (0.0, 1.0):
        assert estimate(speeds, moved, ratio) == estimate(speeds, work, ratio)
    assert decide(speeds, moved, 0.2).layer_compute_s == decide(speeds, work, 0.2).layer_compute_s + 8 * 0.5
    loading = replace(speeds, bytes_per_s=1.0)  # 10 s a layer: 2 are the fresh rows'
    assert free_ratio(loading, work) == pytest.approx(8 / 10)
    assert free_ratio(loading, moved) == pytest.approx(0.6), "6 rows recomputed, 4 moved: 8 s"


@pytest.mark.parametrize(("layers", "ratio", "speedup"), [(16, 0.05, 8.0), (28, 0.15, 5.2), (32, 0.2, 4.3)])
def test_the_ceilings_of_the_cost_model(layers: int, ratio: float, speedup: float) -> None:
    """Loading hidden, work by rows alone: time over full is (1 + (L - 1) s / N) / L."""
    work = Workload(layers, 4096, 4032, 2000, 64, 4064, 1, kv_share=0.0)
    speeds = Speeds(0.0, 1e-5, 0.0, 0.0)
    found = estimate_full(speeds, work).prefill_s / estimate(speeds, work, ratio).prefill_s
    assert found == pytest.approx(speedup, rel=0.06)


@given(
    layers=st.integers(1, 80),
    exact=st.integers(0, 5000),
    inexact=st.integers(0, 5000),
    fresh=st.integers(1, 5000),
    check=st.integers(0, 5),
    load=st.floats(1, 1e13),
    floor=st.floats(0, 1),
    costs=st.tuples(*[st.floats(0, 1e-2)] * 3),
)
def test_never_slower_than_full_prefill_by_its_own_estimate(
    layers: int, exact: int, inexact: int, fresh: int, check: int, load: float, floor: float, costs: tuple[float, ...]
) -> None:
    total = exact + inexact + fresh
    work = Workload(
        layers, total, inexact, exact + inexact / 2, fresh, exact + inexact + fresh / 2, (exact + inexact) * layers * 512,
        0.2, min(check, layers - 1),
    )  # fmt: skip
    speeds = Speeds(costs[0], 1e-6 + costs[1], costs[2] * 1e-3, 1e-5, bytes_per_s=load)
    found = decide(speeds, work, floor)
    assert floor <= found.ratio <= 1
    assert found.chosen.prefill_s <= found.full.prefill_s * (1 + 1e-9) or not work.kv_bytes
    assert found.chosen.prefill_s >= max(found.chosen.compute_s, found.chosen.load_s) * (1 - 1e-9)
    assert math.isfinite(found.layer_load_s)


def test_speeds_are_learnt_from_what_happened() -> None:
    """Wrong by a factor at first, right after some prefills; one odd run does not spoil them."""
    true = loading_a_layer_in(0.02)
    speeds = Speeds(SPEEDS.layer_s * 3, SPEEDS.row_s * 3, SPEEDS.pair_s * 3, SPEEDS.head_s * 3, bytes_per_s=1e12)

    def once(speeds: Speeds, slower: float = 1.0) -> Speeds:
        told, real = estimate(speeds, WORK, 0.2), estimate(true, WORK, 0.2)
        return learn(speeds, told.compute_s, real.compute_s * slower, (WORK.kv_bytes, real.load_s * slower), 0.003)

    for _ in range(60):
        speeds = once(speeds)
    assert speeds.row_s == pytest.approx(true.row_s, rel=0.05)
    assert speeds.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.1)
    assert speeds.rest_s == pytest.approx(0.003, rel=0.05)
    assert (speeds.prefills, speeds.not_loaded) == (60, 0)
    full = learn(speeds, 1.0, 1.0, NOTHING, 0.0)
    assert (full.not_loaded, full.bytes_per_s) == (1, speeds.bytes_per_s)
    odd = once(speeds, slower=100.0)
    assert odd.row_s < 1.2 * speeds.row_s
    guess = learn(SPEEDS, 1.0, 50.0, NOTHING, 0.0, is_measured=False)
    assert guess.row_s == pytest.approx(50 * SPEEDS.row_s), "the first prefill is right, not the guess"
    slower, faster = (learn(guess, 50.0, s, NOTHING, 0.0, is_measured=False).row_s for s in (500.0, 25.0))
    assert slower < 1.2 * guess.row_s, "it may have captured graphs"
    assert faster < 0.75 * guess.row_s
    first = learn(replace(SPEEDS, bytes_per_s=math.inf), 1.0, 1.0, (1000, 0.1), 0.0)
    assert first.bytes_per_s == 10_000  # the first measure is taken as it is
    assert learn(SPEEDS, 1.0, 1.0, NOTHING, 0.0).bytes_per_s == SPEEDS.bytes_per_s
