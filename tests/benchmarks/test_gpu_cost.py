"""Expected times on a GPU (`benchmarks/gpu/cost.py`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu.cost import GPUS, Assumed, Ceilings, Expected, Host  # noqa: E402

from cacheblend_cli.model.families import spec_from_config  # noqa: E402

LENGTH, SUFFIX = 4096, 64


def expected(ceilings: Ceilings = GPUS["H100"], host: Host | None = None) -> Expected:
    config = json.loads((ROOT / "configs" / "llama-3.1-8b.json").read_text())
    measured = json.loads((ROOT / "benchmarks" / "results" / "gpu_host.json").read_text())["microseconds"]
    return Expected(spec_from_config(config), ceilings, host or Host.of(measured, Assumed()))


def blended(model: Expected, selector: str = "query", *, corrected: bool = True, kv_bytes: float = 0.0) -> float:
    return model.blended(selector, LENGTH, SUFFIX, 0.15, corrected=corrected, kv_bytes=kv_bytes)


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_less_work_takes_less_time(selector: str) -> None:
    model = expected()
    whole, plain, moved = model.full(LENGTH), blended(model, selector, corrected=False), blended(model, selector)
    assert plain < moved < whole
    assert blended(model, selector, kv_bytes=4e9) > moved


def test_a_slow_host_or_a_slow_bus_sets_the_pace() -> None:
    slow = expected(host=Host(layer=5e-3, probe=0.0, correction=0.0))
    assert blended(slow) == pytest.approx((27 + 32) * 5e-3, rel=0.05)  # the probe's layers, and all
    last = expected(Ceilings(798e12, 3.0e12, bus=1e9))
    assert 0.25 < blended(last, kv_bytes=0.25e9) < 0.26  # the last layer's KV arrives, and is computed


def test_a_full_prefill_takes_what_its_products_take_and_little_more() -> None:
    model = expected()
    flops = 2 * LENGTH * 6.98e9
    assert 1.0 < model.full(LENGTH) / (flops / GPUS["H100"].flops) < 1.6


def test_the_committed_table_is_of_the_committed_host_times() -> None:
    text = (ROOT / "benchmarks" / "results" / "gpu_expected.md").read_text()
    model = expected()
    assert f"| H100 | 4096 | full prefill | {model.full(LENGTH) * 1e3:.1f} |" in text
    assert f"| H100 | 4096 | `query` .15 | {blended(model) * 1e3:.1f} (" in text
