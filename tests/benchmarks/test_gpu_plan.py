"""The plan of benchmarks/gpu_check.py on a clock that the tests move: budget, order, hangs, failures, and what is left
of a run that was cut off."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu.log import Line, Log, assemble  # noqa: E402
from gpu.plan import CLOSING_S, MINUTES, PLAN, QUIET_S, SLOW_STARTS, Part  # noqa: E402
from gpu.runner import Runner  # noqa: E402

IMPORTS_S = 7.0
Cases = list[tuple[str, float | str]]  # name; seconds, or how it goes wrong


@dataclass
class Clock:
    """Time passes in `sleep`, and processes run meanwhile."""

    time: float = 1000.0
    children: list[Child] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for child in self.children:
            child.run()


class Child:
    """A process that runs its share of a part's cases, or what goes wrong: hangs, dies, raises or is slow."""

    def __init__(self, clock: Clock, log: Log, part: Part, number: int, seconds: float, cases: Cases) -> None:
        self._clock, self._log, self._part, self._number = clock, log, part, number
        self._code: int | None = None
        self._next = clock.time + IMPORTS_S
        over = log.over(part.name)
        self._left = [case for case in cases[number :: part.processes] if case[0] not in over]
        self._end, self._running, self._ready = clock.time + IMPORTS_S + seconds, "", False
        self.started_at = clock.time

    def run(self) -> None:
        while self._code is None and self._clock.time >= self._next:
            self._step()

    def _write(self, case: str, event: str, **more: object) -> None:
        self._log.write(self._part.name, case, event, process=self._number, **more)

    def _step(self) -> None:
        if not self._ready:
            self._ready = True
            self._write("(ready)", "ready")
        elif self._running:
            self._write(self._running, "row", part="commands", row={"case": self._running, "ok": True})
            self._write(self._running, "done")
            self._running = ""
        elif not self._left:
            self._code = 0
        else:
            case, what = self._left.pop(0)
            if self._clock.time >= self._end:
                self._write(case, "skipped", message="no time was left")
                return
            self._write(case, "start")
            if what == "dies":
                self._code = -11
            elif what == "raises":
                self._write(case, "fault", message="RuntimeError")
            elif what == "hangs":
                self._next = float("inf")
            else:
                if what == "slow":
                    self._write(case, "slow", limit=SLOW_STARTS["model"])
                self._running, self._next = case, self._clock.time + (50.0 if what == "slow" else float(what))

    def poll(self) -> int | None:
        return self._code

    def stop(self, stack: bool) -> None:
        self._code = -9
        self._clock.sleep(0.2 if stack else 0.0)


def some_cases(part: Part, count: int = 40, seconds: float = 3.0) -> Cases:
    return [(f"{part.name} {number}", seconds) for number in range(count * part.processes)]


@dataclass
class Rehearsal:
    """Runs of the plan that share a log."""

    path: Path
    cases: dict[str, Cases] = field(default_factory=dict)
    minutes: float = MINUTES
    clock: Clock = field(default_factory=Clock)
    parts: list[str] = field(default_factory=list)
    silent: str = ""  # a part whose processes write nothing

    def run(self, plan: tuple[Part, ...] = PLAN) -> float:
        """Return the seconds it took."""
        begun, log = self.clock.time, Log(self.path)

        def spawn(part: Part, number: int, seconds: float) -> Child:
            child = Child(self.clock, log, part, number, seconds, self.cases.get(part.name, some_cases(part)))
            if part.name != self.silent:
                self.clock.children.append(child)
            return child

        Runner(log, spawn, 60 * self.minutes, self.clock).run(
            plan, lambda part, seconds: self.parts.append(part.name), lambda: None
        )
        return self.clock.time - begun

    def lines(self) -> list[Line]:
        return Log(self.path).lines()

    def result(self) -> dict[str, Any]:
        return assemble(self.lines(), "GPU", tiny=False)


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    return Rehearsal(tmp_path / "log.jsonl")


@pytest.mark.parametrize("minutes", [5.0, MINUTES, 9.5])
def test_the_total_is_kept_and_the_order_is_the_tables(rehearsal: Rehearsal, minutes: float) -> None:
    rehearsal.minutes = minutes
    rehearsal.cases = {part.name: some_cases(part, 300, 1.0) for part in PLAN}
    assert rehearsal.run() <= 60 * minutes
    assert rehearsal.parts == [part.name for part in PLAN]
    assert {line["step"] for line in rehearsal.lines() if line["event"] == "done"} == {*rehearsal.parts}


def test_a_part_has_its_seconds(rehearsal: Rehearsal) -> None:
    rehearsal.cases = {part.name: some_cases(part, 300, 1.0) for part in PLAN}
    rehearsal.run()
    lines = rehearsal.lines()
    for part in PLAN:
        done = sum(line["event"] == "done" and line["step"] == part.name for line in lines)
        assert done / part.processes == pytest.approx(part.seconds - IMPORTS_S, abs=4)


@pytest.mark.parametrize("processes", [1, 8])
def test_a_hang_costs_20_seconds(rehearsal: Rehearsal, processes: int) -> None:
    part = Part("part", "", 300, "", processes=processes)
    cases = some_cases(part, 10, 1.0)
    usual = Rehearsal(rehearsal.path.with_name("usual.jsonl"), {"part": cases}).run((part,))
    rehearsal.cases["part"] = [(name, "hangs" if n < processes else s) for n, (name, s) in enumerate(cases)]
    assert rehearsal.run((part,)) <= usual + 20 + IMPORTS_S  # all hang at once; another process continues
    result = rehearsal.result()
    assert result["faults"] == [f"part, part {n}: nothing came for {QUIET_S:.0f} s" for n in range(processes)]
    assert len(result["commands"]) == 9 * processes


def test_a_slow_start_may_be_silent_for_longer_and_is_bounded(rehearsal: Rehearsal) -> None:
    rehearsal.cases["part"] = [("model", "slow"), ("next", 1.0)]
    rehearsal.run((Part("part", "", 300, ""),))
    assert not rehearsal.result()["faults"]
    assert max(SLOW_STARTS.values()) <= 60


def test_a_process_that_never_says_anything_ends_its_part_alone(rehearsal: Rehearsal) -> None:
    rehearsal.silent = "kernel checks"
    rehearsal.run()
    assert rehearsal.parts == [part.name for part in PLAN]
    ends = [line for line in rehearsal.lines() if line["step"] == "kernel checks"]
    assert {line["event"] for line in ends} <= {"fault", "skipped"}
    assert len(ends) == 8


def test_a_failing_case_is_skipped_and_the_rest_goes_on(rehearsal: Rehearsal) -> None:
    part = Part("part", "", 300, "")
    rehearsal.cases["part"] = [("one", 1.0), ("dies", "dies"), ("raises", "raises"), ("two", 1.0)]
    rehearsal.run((part,))
    result = rehearsal.result()
    assert [row["case"] for row in result["commands"]] == ["one", "two"]
    assert result["faults"] == ["part, dies: the process ended with -11", "part, raises: RuntimeError"]


def test_a_part_whose_processes_all_die_at_once_is_given_up(rehearsal: Rehearsal) -> None:
    part = Part("part", "", 300, "")
    rehearsal.cases["part"] = [(f"case {n}", "dies") for n in range(5)]
    assert rehearsal.run((part,)) < 60
    assert len(rehearsal.result()["faults"]) == 5


def test_a_line_that_was_cut_off_is_not_read(rehearsal: Rehearsal) -> None:
    rehearsal.run((Part("part", "", 300, ""),))
    before = rehearsal.result()
    with open(rehearsal.path, "a") as file:
        file.write('{"step": "part", "case": "cut o')
    assert rehearsal.result() == before


def test_the_page_has_the_plan() -> None:
    text = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\d+:\d\d) \| (.+?) \| (.*?) \|$", text, re.MULTILINE)
    wanted, time = list[tuple[str, str, str]](), 0.0
    for part in PLAN:
        wanted.append((clock(time), part.name, part.what))
        time += part.seconds
    assert found == [*wanted, (clock(time + CLOSING_S), "end", "")]
    assert f"--minutes {MINUTES:g}" in text


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
