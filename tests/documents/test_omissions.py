"""Omissions in words."""

from __future__ import annotations

from cacheblend_documents.omissions import Omissions


def named(*places: str) -> str:
    omissions = Omissions()
    for place in places:
        omissions.add("chart", place)
    return next(iter(omissions))


def test_places_of_one_kind_are_named_together() -> None:
    assert named("slide 3") == "1 chart (slide 3)"
    assert named("slide 3", "slide 5", "slide 5") == "3 charts (slides 3, 5)"
    assert named("sheet Costs", "sheet Week 1") == "2 charts (sheets Costs, Week 1)"
    assert named("sheet Costs", "Scope") == "2 charts (sheet Costs, Scope)"


def test_few_places_are_named() -> None:
    assert named(*(f"slide {n}" for n in range(1, 41))) == "40 charts (slides 1, 2, 3, 4, 5, 6, 7, 8, ...)"
    long = [f"sheet {'x' * 50}{n}" for n in range(4)]
    assert named(*long) == f"4 charts (sheets {'x' * 50}0, {'x' * 50}1, ...)"
    assert named("x" * 300) == f"1 chart ({'x' * 300})"
