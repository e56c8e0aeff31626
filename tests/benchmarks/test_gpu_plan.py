"""The plan of benchmarks/gpu_check.py on a clock that the tests move: budget, order, hangs, failures, and what is left
of a run that was cut off."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu import plan  # noqa: E402
from gpu.log import Log, Where, assemble, has_work, read_lines  # noqa: E402
from gpu.plan import PLAN, QUIET_S, SLOW_STARTS, Part  # noqa: E402
from gpu.runner import Runner  # noqa: E402

HERE = Where("GPU", "torch 1", "abc")
IMPORTS_S = 7.0
Cases = list[tuple[str, float | str]]  # name; seconds, or how it goes wrong


class Killed(Exception):
    """The whole run was killed."""


@dataclass
class Clock:
    """Time passes in `sleep`, and processes run meanwhile."""

    time: float = 1000.0
    killed_at: float = float("inf")
    children: list[Child] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for child in self.children:
            child.run()
        if self.time >= self.killed_at:
            raise Killed


class Child:
    """A process that runs its share of a part's cases, or what goes wrong: hangs, dies, raises or is slow."""

    def __init__(self, clock: Clock, log: Log, part: Part, number: int, seconds: float, cases: Cases) -> None:
        self._clock, self._log, self._part, self._number = clock, log, part, number
        self._code: int | None = None
        self._next = clock.time + IMPORTS_S
        over, again = log.over(part.name), log.again(part.name)
        own = cases[number :: part.processes]
        self._left = [case for case in own if case[0] not in over and not (again and case[0] not in again)]
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
            self._write(self._running, "row", part="checks", row={"case": self._running, "ok": True})
            self._write(self._running, "done")
            self._running = ""
        elif not self._left:
            self._write("", "end", processes=self._part.processes)
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
    minutes: float = plan.minutes_of(1)
    clock: Clock = field(default_factory=Clock)
    parts: list[str] = field(default_factory=list)
    where: Where = HERE
    silent: str = ""  # a part whose processes write nothing

    def run(self, plan: tuple[Part, ...] = PLAN, again: bool = False, killed_after: float = float("inf")) -> float:
        """Return the seconds it took."""
        begun, self.clock.killed_at = self.clock.time, self.clock.time + killed_after
        log = Log(self.path, str(self.where))

        def spawn(part: Part, number: int, seconds: float) -> Child:
            child = Child(self.clock, log, part, number, seconds, self.cases.get(part.name, some_cases(part)))
            if part.name != self.silent:
                self.clock.children.append(child)
            return child

        runner = Runner(log, spawn, 60 * self.minutes, self.clock, again=again)
        try:
            runner.run(plan, lambda part, seconds: self.parts.append(part.name), lambda: None)
        finally:
            self.clock.children.clear()
        return self.clock.time - begun

    def resume(self, again: bool = False) -> float:
        Log(self.path, str(self.where)).resume(self.path, again)
        self.parts.clear()
        return self.run(again=again)

    def starts(self) -> list[str]:
        return [line["case"] for line in read_lines(self.path) if line["event"] == "start"]


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    return Rehearsal(tmp_path / "log.jsonl")


def first_call() -> list[str]:
    return [part.name for part in PLAN if part.call == 1]


@pytest.mark.parametrize("minutes", [2.0, 4.0, plan.minutes_of(1), 9.5])
def test_the_total_is_kept_and_the_order_is_the_tables(rehearsal: Rehearsal, minutes: float) -> None:
    rehearsal.minutes = minutes
    rehearsal.cases = {part.name: some_cases(part, 300, 1.0) for part in PLAN}
    assert rehearsal.run() <= 60 * minutes
    assert rehearsal.parts == first_call()
    done = {line["step"] for line in read_lines(rehearsal.path) if line["event"] == "done"}
    assert done == set(first_call())  # each had its turn


def test_a_part_has_its_seconds(rehearsal: Rehearsal) -> None:
    rehearsal.cases = {part.name: some_cases(part, 300, 1.0) for part in PLAN}
    rehearsal.run()
    lines = read_lines(rehearsal.path)
    for part in (part for part in PLAN if part.call == 1):
        done = sum(line["event"] == "done" and line["step"] == part.name for line in lines)
        assert done / part.processes == pytest.approx(part.seconds, rel=0.25)


def test_what_the_first_call_leaves_goes_to_the_second_ones_parts(rehearsal: Rehearsal) -> None:
    rehearsal.cases = {part.name: some_cases(part, 2) for part in PLAN}
    rehearsal.run()
    assert rehearsal.parts == [part.name for part in PLAN]


@pytest.mark.parametrize("processes", [1, 8])
def test_a_hang_costs_20_seconds(rehearsal: Rehearsal, processes: int) -> None:
    part = Part("part", 300, "", processes=processes)
    cases = some_cases(part, 10, 1.0)
    usual = Rehearsal(rehearsal.path.with_name("usual.jsonl"), {"part": cases}).run((part,))
    rehearsal.cases["part"] = [(name, "hangs" if n < processes else s) for n, (name, s) in enumerate(cases)]
    assert rehearsal.run((part,)) <= usual + 20 + IMPORTS_S  # all hang at once; another process continues
    result = assemble(read_lines(rehearsal.path), tiny=False)
    assert result["faults"] == [f"part, part {n}: nothing came for {QUIET_S:.0f} s" for n in range(processes)]
    assert len(result["checks"]) == 9 * processes


def test_a_slow_start_may_be_silent_for_longer_and_is_bounded(rehearsal: Rehearsal) -> None:
    part = Part("part", 300, "")
    rehearsal.cases["part"] = [("model", "slow"), ("next", 1.0)]
    rehearsal.run((part,))
    assert not assemble(read_lines(rehearsal.path), tiny=False)["faults"]
    slow = [line["row"] for line in read_lines(rehearsal.path) if line.get("part") == "slow"]
    assert slow == [{"what": "start", "seconds": pytest.approx(IMPORTS_S, abs=0.3)}]  # measured
    assert max(SLOW_STARTS.values()) <= 60


def test_a_process_that_never_says_anything_ends_its_part_alone(rehearsal: Rehearsal) -> None:
    rehearsal.silent = "kernel checks"
    rehearsal.run()
    assert rehearsal.parts[:5] == first_call()
    faults = assemble(read_lines(rehearsal.path), tiny=False)["faults"]
    assert faults == ["kernel checks: nothing came for 60 s"] * 8


def test_a_failing_case_is_skipped_and_the_rest_goes_on(rehearsal: Rehearsal) -> None:
    part = Part("part", 300, "")
    rehearsal.cases["part"] = [("one", 1.0), ("dies", "dies"), ("raises", "raises"), ("two", 1.0)]
    rehearsal.run((part,))
    result = assemble(read_lines(rehearsal.path), tiny=False)
    assert [row["case"] for row in result["checks"]] == ["one", "two"]
    assert result["faults"] == ["part, dies: the process ended with -11", "part, raises: RuntimeError"]


def test_a_part_whose_processes_all_die_at_once_is_given_up(rehearsal: Rehearsal) -> None:
    part = Part("part", 300, "")
    rehearsal.cases["part"] = [(f"case {n}", "dies") for n in range(5)]
    assert rehearsal.run((part,)) < 60
    assert len(assemble(read_lines(rehearsal.path), tiny=False)["faults"]) == 5


@pytest.mark.parametrize("minute", [0.3, 1, 2, 3, 4, 5, 6])
def test_what_a_killed_run_has_written_is_whole_and_is_not_repeated(rehearsal: Rehearsal, minute: float) -> None:
    with pytest.raises(Killed):
        rehearsal.run(killed_after=60 * minute)
    with open(rehearsal.path, "a") as file:
        file.write('{"step": "ceilings", "case": "cut o')  # in the middle of a line
    done = [line["case"] for line in read_lines(rehearsal.path) if line["event"] == "done"]
    assert len(assemble(read_lines(rehearsal.path), tiny=False)["checks"]) >= len(done) > 0
    rehearsal.resume()
    assert len(set(rehearsal.starts())) == len(rehearsal.starts())  # nothing that was done, and the cut off one anew
    assert {*done} <= {line["case"] for line in read_lines(rehearsal.path) if line["event"] == "done"}


def test_a_resumed_run_starts_with_what_is_left(rehearsal: Rehearsal) -> None:
    rehearsal.cases = {part.name: some_cases(part, 3 if part.name != "llama-3.1-8b" else 100) for part in PLAN}
    rehearsal.run()
    assert any(line["event"] == "skipped" for line in read_lines(rehearsal.path))
    rehearsal.resume()
    assert rehearsal.parts == ["llama-3.1-8b"]


def test_a_repetition_runs_only_what_failed_and_the_second_calls_parts(rehearsal: Rehearsal) -> None:
    bad: Cases = [("good", 1.0), ("raises", "raises"), ("dies", "dies"), ("also good", 1.0)]
    rehearsal.cases = {part.name: some_cases(part, 300, 1.0) for part in PLAN} | {"llama-3.2-1b": bad}
    rehearsal.run()
    rehearsal.cases["llama-3.2-1b"] = [(name, 1.0) for name, _ in bad]
    rehearsal.minutes = plan.minutes_of(2)
    rehearsal.where = replace(HERE, code="mended")
    assert rehearsal.resume(again=True) <= 60 * rehearsal.minutes
    assert rehearsal.parts == ["llama-3.2-1b", *(part.name for part in PLAN if part.call == 2)]
    again = [line for line in read_lines(rehearsal.path) if line["on"] == str(rehearsal.where)]
    assert [n["case"] for n in again if n["event"] == "start" and n["step"] == "llama-3.2-1b"] == ["raises", "dies"]
    rows = [row["case"] for row in assemble(read_lines(rehearsal.path), tiny=False)["checks"]]
    assert {"good", "raises", "dies", "also good"} <= {*rows}
    assert {n["step"] for n in again if n["event"] == "start"} & {*first_call()} == {"llama-3.2-1b"}


def test_a_wrong_number_is_repeated_and_a_right_one_is_not(tmp_path: Path) -> None:
    rows = {"right": {"ok": True}, "wrong": {"ok": False}, "raised": {"message": "Error"}, "speed": {"seconds": 1.0}}
    log = Log(tmp_path / "log.jsonl", str(HERE))
    for case, row in rows.items():
        log.write("step", case, "row", part="checks", row=row)
        log.write("step", case, "done")
    log.write("step", "", "end", processes=1)
    log.resume(log.path)
    assert not has_work(log.lines(), "step", again=False)
    log.resume(log.path, again=True)
    assert log.over("step") == {"right", "speed"}
    assert log.again("step") == {"wrong", "raised"}
    assert has_work(log.lines(), "step", again=True)


def test_a_preparation_that_failed_is_repeated_with_all_that_it_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", str(HERE))
    log.write("step", "done", "done")
    log.write("step", "", "fault", message="no memory")
    log.resume(log.path, again=True)
    assert has_work(log.lines(), "step", again=True)
    assert (log.over("step"), log.again("step")) == ({"done"}, set())  # no case is excluded


def test_the_page_has_the_plan(tmp_path: Path) -> None:
    text = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (\d+:\d\d) \| (.+?) \| (.*?) \|$", text, re.MULTILINE)
    wanted, time = list[tuple[str, str, str]](), 0.0
    for call in plan.CALLS:
        wanted.append((clock(time), "start, transfer", ""))
        time += plan.PREPARATION_S
        if call > 1:
            wanted.append((clock(time), "what failed", ""))
            time += plan.AGAIN_S
        for part in PLAN:
            if part.call == call:
                wanted.append((clock(time), part.name, part.what))
                time += part.seconds
        time += plan.CLOSING_S
    wanted.append((clock(time), "end", ""))
    assert told == wanted
    assert time <= 12.5 * 60
    for call in plan.CALLS:
        assert f"--minutes {plan.minutes_of(call):g}" in text


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
