"""Run the parts of the plan in processes of their own, within one total budget.

The runner reads what the processes append to the log. A process that writes nothing for too long is ended, its case is
a fault, and another process continues with the next case. Time that a part leaves is divided among the following ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gpu.log import Line, Log
from gpu.plan import CLOSING_S, QUIET_S, SLOW_STARTS, Part

NO_TIME = "no time was left"
TICK_S = 0.2
LEAST_S = 2.0  # a part with less is not started


class Clock:
    """Seconds, and waiting."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


class Child(Protocol):
    """A process of a part."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def stop(self, stack: bool) -> None:
        """End it, with its children. stack: print its stack first."""


Spawn = Callable[[Part, int, float], Child]
"""Starts a process of a part: its number, and the seconds after which it starts no further case."""


class Runner:
    """Runs parts, in order."""

    def __init__(self, log: Log, spawn: Spawn, seconds: float, clock: Clock) -> None:
        self.log, self.spawn, self.clock = log, spawn, clock
        self.end = clock.now() + seconds - CLOSING_S

    def run(self, plan: Sequence[Part], on_part: Callable[[Part, float], None], after: Callable[[], None]) -> None:
        """Run the parts. on_part: callback with the seconds of the next part; after: after each."""
        for index, part in enumerate(plan):
            left = sum(other.seconds for other in plan[index:])
            seconds = (self.end - self.clock.now()) * part.seconds / left
            if seconds < LEAST_S:
                self.log.write(part.name, "", "skipped", message=NO_TIME)
                continue
            on_part(part, seconds)
            self.run_part(part, seconds)
            after()

    def run_part(self, part: Part, seconds: float) -> None:
        limit = self.clock.now() + seconds
        running = [Process(self, part, number, limit) for number in range(part.processes)]
        while running:
            self.clock.sleep(TICK_S)
            for line in self.log.new():
                for process in running:
                    process.hear(line)
            running = [process for process in running if process.goes_on()]


class Process:
    """One of a part's processes, and those that continue behind the cases at which it ended. limit: time at which the
    part ends."""

    def __init__(self, runner: Runner, part: Part, number: int, limit: float) -> None:
        self._runner, self._part, self._number, self._limit = runner, part, number, limit
        self._log, self._clock = runner.log, runner.clock
        self._start()

    def _start(self) -> None:
        self._heard, self._patience = self._clock.now(), SLOW_STARTS["start"]
        self._num_over, self._ready = self._count_over(), False
        self._child = self._runner.spawn(self._part, self._number, self._limit - self._heard)

    def hear(self, line: Line) -> None:
        """Take note of a line of the log."""
        if (line["step"], line["process"]) != (self._part.name, self._number):
            return
        self._ready |= line["case"] == "(ready)"
        if not self._ready:  # the last words of the process before
            return
        self._heard = self._clock.now()
        if line.get("part") != "compiled":  # a kernel in the middle of something else
            self._patience = line["limit"] if line["event"] == "slow" else QUIET_S

    def goes_on(self) -> bool:
        """End the process if it hangs or its time is up, and continue behind a case that ended it. Returns whether the
        part still runs."""
        now, code = self._clock.now(), self._child.poll()
        if code == 0:
            return False
        if code is not None:
            return self._continue("fault", f"the process ended with {code}")
        if now >= self._limit:
            self._child.stop(stack=False)
            return self._continue("skipped", NO_TIME)
        if now - self._heard > self._patience:
            self._child.stop(stack=True)
            return self._continue("fault", f"nothing came for {self._patience:.0f} s")
        return True

    def _continue(self, event: str, message: str) -> bool:
        """Note how the running case ended. Start another process if at least one more case is over."""
        name = self._part.name
        for case in self._log.started(name, self._number):
            self._log.write(name, case, event, process=self._number, message=message)
        moved = self._count_over() > self._num_over
        own = [n for n in self._log.lines() if (n["step"], n["process"]) == (name, self._number)]
        if not moved and not (own and own[-1]["event"] == "fault"):  # its preparation failed, and it did not say why
            self._log.write(name, "", event, process=self._number, message=message)
        if not moved or self._clock.now() >= self._limit - LEAST_S:
            return False
        self._start()
        return True

    def _count_over(self) -> int:
        return len(self._log.over(self._part.name, self._number))
