"""benchmarks/decode.py: a step's time is divided among its parts without counting any twice."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest


def test_time_of_a_part_is_without_that_of_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def outer() -> None:
        passes(1)
        place.product()
        place.product()

    def fails() -> None:
        passes(5)
        raise ValueError

    place = SimpleNamespace(product=lambda: passes(10), outer=outer, fails=fails)
    parts = importlib.import_module("decode").Parts(lambda: now)
    for name in ("product", "outer", "fails"):
        parts.time(place, name, name)
    place.outer()
    with pytest.raises(ValueError):  # noqa: PT011
        place.fails()
    place.product()
    assert dict(parts.seconds) == {"product": 30, "outer": 1, "fails": 5}
    assert parts.calls["product"] == 3
