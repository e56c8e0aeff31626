"""Processes of `gpu_check.py`, each for a part of the plan:

    python -m gpu.steps --step "kernel checks" --process 1/8 --device cuda --log STEM.jsonl --on TAG --folder /dev/shm/x
    --seconds 300

A step is a list of cases; ended ones (`log.py`) are skipped. If an exception leaves a CUDA context in which nothing
runs, the process ends with RESTART, and another continues behind that case.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gpu.log import ASSUMED, Budget, Log, rows_of
from gpu.plan import SLOW_STARTS

RESTART, HOPELESS = 3, 4
Rows = Iterator[tuple[str, dict[str, Any]]]  # (part of the result, row)
Cases = Iterator[tuple[str, Callable[[], Rows]]]  # (name, function that runs it)


@dataclass(frozen=True)
class Context:
    """Inputs of a process."""

    step: str
    device: Any
    tiny: bool
    folder: Path
    log: Log
    budget: Budget
    process: tuple[int, int] = (0, 1)  # which of how many

    @contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Announce a slow start, one of SLOW_STARTS, and note what it took."""
        self.log.write(self.step, f"({what})", "slow", limit=SLOW_STARTS[what])
        start = time.perf_counter()
        yield
        row = {"what": what, "seconds": time.perf_counter() - start}
        self.log.write(self.step, f"({what})", "row", part="slow", row=row)
        freeze()

    def ceilings(self) -> dict[str, Any]:
        measured = {
            name: v for _, part, row in rows_of(self.log.lines()) if part == "ceilings" for name, v in row.items()
        }
        return ASSUMED | measured

    def synchronize(self) -> None:
        """Wait for the device; raises if a kernel has left a dead context."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def works(self) -> bool:
        """Return whether the next case can run in this process."""
        try:
            self.synchronize()
        except Exception:
            return False
        return True


def cases_of(context: Context) -> Cases:
    if context.step == "ceilings":
        return ceiling_cases(context)
    if context.step == "kernel checks":
        return check_cases(context)
    if context.step == "kernel speeds":
        return speed_cases(context)
    if context.step == "families":
        from gpu.families import cases as family_cases

        return family_cases(context)
    if context.step == "qwen3.5-0.8b":
        from gpu.hybrid import cases as hybrid_cases

        return hybrid_cases(context)
    if context.step == "command line":
        from gpu.command_line import cases

        return cases(context)
    from gpu.end_to_end import cases as model_cases

    return model_cases(context)


def ceiling_cases(context: Context) -> Cases:
    from gpu.speeds import CEILINGS

    def measure(name: str) -> Rows:
        yield "ceilings", {name: CEILINGS[name](context.device, context.tiny)}

    for name in CEILINGS:
        yield name, partial(measure, name)


def check_cases(context: Context) -> Cases:
    from gpu.checks import checks_of

    def run(check: Callable[[], dict[str, Any]]) -> Rows:
        yield "checks", check()
        context.synchronize()

    number, count = context.process
    for name, check in islice(checks_of(context.device, context.tiny), number, None, count):
        yield name, partial(run, check)


def speed_cases(context: Context) -> Cases:
    from gpu.speeds import FAMILIES, measure_work, works

    def run(work: Any) -> Rows:
        yield "kernels", measure_work(work, context.device, context.tiny, context.ceilings())
        context.synchronize()

    for family in FAMILIES:
        try:
            for work in works(family, context.device, context.tiny):
                yield f"{work.kernel} {work.case}", partial(run, work)
        except Exception as error:  # inputs of this family; others continue
            traceback.print_exc()
            context.log.write(context.step, "", "fault", message=f"{family}: {type(error).__name__}: {error}")


def freeze() -> None:
    """Freeze what was imported and made so far, as the product does: the garbage collector would search it during a
    measurement."""
    gc.collect()
    gc.freeze()


def frozen(cases: Cases) -> Cases:
    """Yield the cases, after freezing what the first one needs."""
    for number, case in enumerate(cases):
        if number == 0:
            freeze()
        yield case


def run_step(context: Context) -> int:
    """Return the exit code: 0, RESTART after a case that left a dead context, HOPELESS if the step's preparation
    did."""
    log, step, left_out = context.log, context.step, False
    over, again = log.over(step), log.again(step)
    log.write(step, "(ready)", "ready")
    try:
        for case, run in frozen(cases_of(context)):
            if case in over or (again and case not in again):
                continue
            if context.budget.left <= 0:
                log.write(step, case, "skipped", message="no time was left")
                left_out = True
                continue
            log.write(step, case, "start")
            try:
                for part, row in run():
                    log.write(step, case, "row", part=part, row=row)
            except Exception as error:  # recorded; continue with the next case
                traceback.print_exc()
                log.write(step, case, "fault", message=f"{type(error).__name__}: {error}")
                if not context.works():
                    return RESTART
                continue
            log.write(step, case, "done")
    except Exception as error:  # preparation between cases: model, store, inputs
        traceback.print_exc()
        log.write(step, "", "fault", message=f"{type(error).__name__}: {error}")
        return HOPELESS
    if not left_out:
        log.write(step, "", "end", processes=context.process[1])
    return 0


def stands() -> None:
    """Print the stack of this process if it dies of a fault or gets SIGUSR1 (see `ChildProcess.stop`)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def note_compiled(context: Context) -> None:
    """Note every kernel that Triton compiles in this process: one that a pack lacks."""
    import triton

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            context.log.write(context.step, "(compiled)", "row", part="compiled", row={"kernel": src.name})

    triton.knobs.compilation.listener = note


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", required=True)
    parser.add_argument("--process", default="0/1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--on", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    stands()
    import torch

    device = torch.device(arguments.device)
    torch.manual_seed(0)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # makes the context
    number, count = map(int, arguments.process.split("/"))
    log, budget = Log(arguments.log, arguments.on, number), Budget(arguments.seconds)
    context = Context(arguments.step, device, arguments.tiny, arguments.folder, log, budget, (number, count))
    if device.type == "cuda":
        note_compiled(context)
    return run_step(context)


if __name__ == "__main__":
    sys.exit(main())
