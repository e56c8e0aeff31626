"""Expected times on a GPU (`benchmarks/gpu/cost.py`): the committed rows, and what follows from less or more work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu.cost import MEASURED, NEW, Ceilings, Expected, host_times  # noqa: E402
from gpu.expected import RESULTS, STEPS, cards, compared, off, page, spec_of  # noqa: E402

LENGTH, SUFFIX, KV_BYTES = 4096, 64, 220e6
CEILINGS = Ceilings(793e12, 2.44e12, 55e9)
UNLIKE = {  # the other card's row of the same case is within 15 %
    ("NVIDIA H100 80GB HBM3", "llama-3.2-1b", 4096, "hkvd 0.15"),
    ("NVIDIA H200", "llama-3.1-8b", 4096, "hkvd 0.15 uncorrected"),
    ("NVIDIA H200", "llama-3.1-8b", 16384, "hkvd 0.15 uncorrected"),
}


def expected(ceilings: Ceilings = CEILINGS) -> Expected:
    return Expected(spec_of("llama-3.1-8b"), ceilings, host_times(2.7), NEW)


def blended(model: Expected, selector: str = "query", *, corrected: bool = True, kv_bytes: float = KV_BYTES) -> float:
    return model.blended(selector, LENGTH, SUFFIX, 0.15, corrected=corrected, kv_bytes=kv_bytes)


def test_the_model_gives_the_committed_rows_of_both_cards() -> None:
    found = list(compared())
    assert len(found) == 40
    wrong = {(card.name, row["step"], row["length"], row["case"]) for card, row, s in found if off(s, row["seconds"])}
    assert wrong == UNLIKE


def test_every_step_gains_and_no_prompt_of_a_small_model_is_slower_than_in_full() -> None:
    for card in cards():
        times = card.steps("llama-3.1-8b", LENGTH)
        assert sorted(times, reverse=True) == times
        assert len(set(times)) == len(STEPS)
        assert card.expected("llama-3.2-1b", LENGTH, "query 0.15", NEW) < card.full("llama-3.2-1b", LENGTH)


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_less_work_takes_less_time(selector: str) -> None:
    model = expected()
    plain, moved = blended(model, selector, corrected=False), blended(model, selector)
    assert blended(model, selector, corrected=False, kv_bytes=0) < plain < moved < model.full(LENGTH)
    assert blended(model, selector, kv_bytes=4e9) > moved


def test_a_slow_host_or_a_slow_bus_sets_the_pace() -> None:
    slow = replace(host_times(2.7), layer=5e-3)
    eager = Expected(spec_of("llama-3.1-8b"), CEILINGS, slow, MEASURED)
    assert eager.full(LENGTH) == pytest.approx(2 * 32 * 5e-3, rel=0.05)
    last = expected(replace(CEILINGS, bus=1e9))
    rest = blended(expected(), kv_bytes=0)
    assert blended(last, kv_bytes=0.25e9) == pytest.approx(0.25 + rest, rel=0.05)  # the probe waits for nearly all


def test_rows_are_rounded_to_the_nearest_tile() -> None:
    model = expected()
    assert [model.rows(length, SUFFIX, 0.15) for length in (512, 4096, 16384)] == [128, 640, 2560]


def test_the_committed_page_is_the_models() -> None:
    assert (RESULTS / "gpu_expected.md").read_text(encoding="utf-8") == page()
