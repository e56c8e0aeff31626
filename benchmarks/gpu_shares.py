"""The kernel checks on several processes at once: most of their time is compiling, which one process does one by one.

Each process writes a row as soon as it has it, so that a share that does not come to its end still tells something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

DONE = "done"


def checks_in_processes(
    device: str, tiny: bool, processes: int, seconds: float, folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what went wrong with the processes themselves). After `seconds` the processes that still run are ended."""
    deadline = time.monotonic() + seconds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    outputs = [folder / f"checks-{part}.jsonl" for part in range(processes)]
    with ExitStack() as stack:
        children = []
        for part, output in enumerate(outputs):
            command = [
                sys.executable,
                __file__,
                "--device",
                device,
                "--part",
                f"{part}/{processes}",
                "--out",
                str(output),
            ]
            errors = stack.enter_context(open(output.with_suffix(".err"), "w+", encoding="utf-8"))
            child = subprocess.Popen(command + ["--tiny"] * tiny, env=environment, stderr=errors)
            stack.callback(_end, child)
            children.append(child)
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    rows: list[dict[str, Any]] = []
    faults = []
    for part, output in enumerate(outputs):
        lines = [json.loads(line) for line in _whole_lines(output)]
        rows += [line for line in lines if line != DONE]
        if DONE not in lines:
            tail = output.with_suffix(".err").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            faults.append(
                f"share {part + 1} of {processes} of the kernel checks did not end" + "".join(f": {t}" for t in tail)
            )
    return rows, faults


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()


def main() -> None:
    import torch
    from gpu_checks import kernel_checks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--part", required=True, help="I/N")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    torch.manual_seed(part)
    with open(arguments.out, "w", encoding="utf-8") as output:
        for row in kernel_checks(torch.device(arguments.device), arguments.tiny, part, parts):
            print(json.dumps(row), file=output, flush=True)
        print(json.dumps(DONE), file=output, flush=True)


if __name__ == "__main__":
    main()
