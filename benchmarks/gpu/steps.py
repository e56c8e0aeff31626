"""Processes of `gpu_check.py`, each for a part of the plan:

    python -m gpu.steps --step "kernel checks" --process 1/8 --device cuda --log STEM.jsonl --folder /dev/shm/x
    --seconds 300

A step is a list of cases; ended ones (`log.py`) are skipped. If an exception leaves a CUDA context in which nothing
runs, the process ends with RESTART, and another continues behind that case.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from gpu.context import Cases, Context, freeze
from gpu.log import Log
from gpu.plan import PLAN

RESTART, HOPELESS = 3, 4


def cases_of(context: Context) -> Cases:
    module = next(part.module for part in PLAN if part.name == context.step)
    cases: Cases = importlib.import_module(f"gpu.{module}").cases(context)
    return cases


def run_step(context: Context) -> int:
    """Return the exit code: 0, RESTART after a case that left a dead context, HOPELESS if the step's preparation
    did."""
    log, step = context.log, context.step
    over = log.over(step)
    log.write(step, "(ready)", "ready")
    try:
        for number, (case, run) in enumerate(cases_of(context)):
            if number == 0:
                freeze()  # what the first case needs
            if case in over:
                continue
            if context.is_over:
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
            log.write(step, case, "done")
    except Exception as error:  # preparation between cases: model, store, inputs
        traceback.print_exc()
        log.write(step, "", "fault", message=f"{type(error).__name__}: {error}")
        return HOPELESS
    return 0


def dump_stacks() -> None:
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
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    dump_stacks()
    device, until = torch.device(arguments.device), time.time() + arguments.seconds
    torch.manual_seed(0)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # makes the context
    number, count = map(int, arguments.process.split("/"))
    log, tiny = Log(arguments.log, number), arguments.tiny
    context = Context(arguments.step, device, tiny, arguments.folder, log, until, (number, count))
    if device.type == "cuda":
        note_compiled(context)
    return run_step(context)


if __name__ == "__main__":
    sys.exit(main())
