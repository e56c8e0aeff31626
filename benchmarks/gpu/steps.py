"""Steps of `gpu_check.py`, each run in a process of its own:

    python -m gpu.steps --step "kernel checks 1/4" --device cuda --log STEM.jsonl --folder /dev/shm/x --seconds 300

A step is a list of cases; ended ones (`log.py`) are skipped. If an exception leaves a CUDA context in which nothing
runs, the process ends with RESTART, and another continues behind that case.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu.log import ASSUMED, Budget, Log, rows_of

RESTART, HOPELESS = 3, 4
PACKAGES = ("torch", "triton", "transformers", "xformers", "lmdb")
Rows = Iterator[tuple[str, dict[str, Any]]]  # (part of the result, row)
Cases = Iterator[tuple[str, Callable[[], Rows]]]  # (name, function that runs it)


@dataclass(frozen=True)
class Step:
    """quiet_s: silence after the first line after which the process counts as hung. together: runs in parallel with
    steps of the same value."""

    name: str
    quiet_s: float = 120.0
    together: str = ""


def stage_steps(stage: int, tiny: bool, processes: int) -> list[Step]:
    """Return the steps of a stage, in order; each starts with the ceilings, unless they are measured."""
    ceilings = Step("ceilings", 90.0)
    if stage == 1:
        checks = [Step(f"kernel checks {part + 1}/{processes}", together="checks") for part in range(processes)]
        return [ceilings, *checks, Step("tiny" if tiny else "llama-3.2-1b"), Step("compute-sanitizer")]
    if stage == 2:
        return [ceilings, Step("tiny, every case" if tiny else "llama-3.1-8b")]
    return [ceilings, Step("kernel speeds"), Step("sweep")]


@dataclass(frozen=True)
class Context:
    """Inputs of a step."""

    step: str
    device: Any
    tiny: bool
    folder: Path
    log: Log
    budget: Budget

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
    name = context.step
    if name == "ceilings":
        return ceiling_cases(context)
    if name.startswith("kernel checks "):
        return check_cases(context)
    if name == "kernel speeds":
        return speed_cases(context)
    if name == "sweep":
        return sweep_cases(context)
    if name == "compute-sanitizer":
        return sanitizer_cases(context)
    from gpu.end_to_end import cases

    return cases(context)


def ceiling_cases(context: Context) -> Cases:
    from gpu.speeds import CEILINGS

    def measure(name: str) -> Rows:
        yield "ceilings", {name: CEILINGS[name](context.device, context.tiny)}

    yield "environment", lambda: iter([("environment", environment(context))])
    for name in CEILINGS:
        yield name, partial(measure, name)


def environment(context: Context) -> dict[str, Any]:
    import torch

    from cacheblend_cli.evaluation.speed import device_name

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = {
        "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "no GPU",
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "memory_gib": round(memory),
    }
    return {"hardware": hardware, "versions": versions}


def check_cases(context: Context) -> Cases:
    from gpu.checks import checks_of

    part, parts = map(int, context.step.rsplit(" ", 1)[1].split("/"))

    def run(check: Callable[[], dict[str, Any]]) -> Rows:
        yield "checks", check()
        context.synchronize()

    for name, check in checks_of(context.device, context.tiny, part - 1, parts):
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


def sweep_cases(context: Context) -> Cases:
    from gpu.speeds import measure_work
    from gpu.sweep import sweep_works

    def run(work: Any) -> Rows:
        yield "sweep", measure_work(work, context.device, context.tiny, context.ceilings())
        context.synchronize()

    for work in sweep_works(context.device, context.tiny):
        yield work.case, partial(run, work)


def sanitizer_cases(context: Context) -> Cases:
    """Run compute-sanitizer over a share of the kernel checks at small shapes, if it is installed."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    program = shutil.which("compute-sanitizer", path=path)

    def run(tool: str) -> Rows:
        if program is None or context.device.type != "cuda":
            context.log.write(
                context.step, tool, "skipped", message="no GPU" if context.device.type != "cuda" else "not found"
            )
            return
        inner = context.folder / f"{tool}.jsonl"
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "gpu.steps", "--tiny"]
        command += ["--step", "kernel checks 1/24", "--device", str(context.device), "--log", str(inner)]
        command += ["--folder", str(context.folder), "--seconds", "75"]
        uncached = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, env=uncached, capture_output=True, text=True, timeout=100, check=False)
        told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")][-4:]
        checked = len(rows_of(Log(inner).lines()))
        yield "sanitizer", {"tool": tool, "ok": done.returncode == 0 and checked > 0, "cases": checked, "told": told}

    for tool in ("memcheck", "racecheck"):
        yield tool, partial(run, tool)


def run_step(context: Context) -> int:
    """Return the exit code: 0, RESTART after a case that left a dead context, HOPELESS if the step's preparation
    did."""
    log, step, over, case = context.log, context.step, context.log.over(context.step), ""
    try:
        for case, run in cases_of(context):
            if case in over:
                continue
            if context.budget.left <= 0:
                log.write(step, case, "skipped", message="no time was left")
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
            for what in context.budget.take_skipped():
                log.write(step, what, "skipped", message="no time was left")
            log.write(step, case, "done")
    except Exception as error:  # preparation between cases: model, store, inputs
        traceback.print_exc()
        log.write(step, "", "fault", message=f"{type(error).__name__}: {error}")
        return HOPELESS
    return 0


def stands() -> None:
    """Print the stack of this process if it dies of a fault or gets SIGUSR1 (see `run_child`)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    stands()
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "store", "kernels")]
    import torch

    device = torch.device(arguments.device)
    torch.manual_seed(0)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    budget = Budget(arguments.seconds)
    return run_step(Context(arguments.step, device, arguments.tiny, arguments.folder, Log(arguments.log), budget))


if __name__ == "__main__":
    sys.exit(main())
