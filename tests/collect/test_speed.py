"""The time that a run still takes, told while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_cli.collect import speed
from cacheblend_cli.collect.speed import CollectSpeed

Group = tuple[float, int, int]
"""Seconds until a group of chunks is committed, its number of chunks, and the rows of each."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    return clock


def follow(run: CollectSpeed, clock: Clock, groups: list[Group]) -> Iterator[tuple[float, float, float, bool]]:
    """Yield after each chunk the seconds since the start, those announced, those really left, and whether an
    announcement before the run is corrected."""
    run.begin(sum(count * rows for _, count, rows in groups))
    start, end = clock.now, clock.now + sum(seconds for seconds, _, _ in groups)
    for seconds, count, rows in groups:
        clock.now += seconds
        for _ in range(count):
            run.count(rows)
            yield clock.now - start, run.left_s, end - clock.now, run.corrects()


def remember(clock: Clock, *speeds: float, seconds: float = 10.0, machine: str = "") -> None:
    for rows_per_s in speeds:
        run = CollectSpeed("model", machine)
        list(follow(run, clock, [(seconds / 10, 1, round(rows_per_s * seconds / 10))] * 10))
        run.keep()


QUIET, BUSY, LAUNCH = (1.0, 5, 20), (2.0, 5, 20), (50.0, 1, 500)


@pytest.mark.parametrize(
    ("groups", "since"),
    [
        ([QUIET] * 100, 10.0), ([BUSY] * 100, 20.0), ([LAUNCH] * 20, 100.0), ([(1.0, 1, 100), (1.0, 100, 1)] * 50, 10.0),
        ([QUIET] * 100 + [BUSY] * 100, 130.0), ([BUSY] * 100 + [QUIET] * 100, 230.0), ([(5.0, 5, 20), *[QUIET] * 200], 20.0),
    ],
    ids=["quiet", "busy", "one chunk a launch", "uneven chunks", "becomes busy", "becomes quiet", "the first one is slow"],
)  # fmt: skip
@pytest.mark.parametrize("earlier", [0.0, 50.0, 100.0])
def test_the_time_left_is_within_a_fifth(clock: Clock, groups: list[Group], since: float, earlier: float) -> None:
    """`since` so many seconds after the start, unless the machine changes later. Whatever earlier runs were like."""
    remember(clock, *[earlier] * bool(earlier))
    told = [(at, left, true) for at, left, true, _ in follow(CollectSpeed("model", ""), clock, groups)]
    close = [left == pytest.approx(true, rel=0.2, abs=2.0) for at, left, true in told if at >= since]
    assert all(close)
    assert len(close) > 10


@pytest.mark.parametrize(
    ("earlier", "corrects"), [((), True), ((98.0,), False), ((50.0,), True), ((50.0, 98.0, 40.0), False)]
)
def test_a_wrong_announcement_is_corrected_once(clock: Clock, earlier: tuple[float, ...], corrects: bool) -> None:
    """The fastest of the last runs is believed: the others found the machine busy."""
    remember(clock, *earlier)
    run = CollectSpeed("model", "")
    told = list(follow(run, clock, [QUIET] * 100))
    assert told[0][1] == pytest.approx(9980 / max(earlier), rel=0.01) if earlier else told[0][1] == 0
    assert [at for at, *_, it_does in told if it_does] == [11.0] * corrects


def test_kv_from_a_tier_is_work_done_and_no_speed(clock: Clock) -> None:
    run = CollectSpeed("model", "")
    run.begin(10_000)
    for _ in range(100):
        clock.now += 0.01
        run.count(50, is_computed=False)
    assert run.left_s == 0, "unknown"
    for _ in range(10):
        clock.now += 1.0
        run.count(100)
    assert run.left_s == pytest.approx(40, rel=0.05)


def test_speeds_are_those_of_the_last_runs_of_this_version_and_machine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(clock, 300.0, 100.0)
    assert CollectSpeed("model", "").rows_per_s == pytest.approx(300)
    remember(clock, 400.0, seconds=1.0)
    assert CollectSpeed("model", "").rows_per_s == pytest.approx(300), "a short run says little"
    remember(clock, 90.0, 110.0)
    assert CollectSpeed("model", "").rows_per_s == pytest.approx(110), "the machine is slower now"
    others = [CollectSpeed("another", ""), CollectSpeed("model", "cuda")]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    others.append(CollectSpeed("model", ""))
    assert [other.rows_per_s for other in others] == [0, 0, 0]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[-1]", '["x"]', "3", "[NaN, Infinity]", '"123"', '{"5": 1}', f"[1{'0' * 400}]", "[" * 100_000],
)
def test_a_damaged_memory_is_none(clock: Clock, content: str) -> None:
    remember(clock, 100.0)
    [file] = (path for path in speed.user_cache.folder("collect").iterdir())
    file.write_text(content)
    assert CollectSpeed("model", "").rows_per_s == 0
