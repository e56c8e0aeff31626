"""Check and measure everything that needs a GPU, in three stages of less than ten minutes each.

    python benchmarks/gpu_check.py [--stages 1,2,3] [--resume [--again]] [--wheels FOLDER] [--store-dir FOLDER] [--out
    STEM] python benchmarks/gpu_check.py --device cpu --tiny --out /tmp/tiny

The machine needs the packages in LARGE and NEEDED; wheels of missing ones (lmdb, msgspec, platformdirs; optionally
xformers) are installed from FOLDER into a temporary folder.

1. Ceilings (copy bandwidth, bf16 matrix product, host to device), every kernel's numbers against fp64, the 1B shape
   from question to answer, and compute-sanitizer over small cases if it is installed.
2. The 8B shape: full prefill, `hkvd` and `query` at .15, `query` without its correction, `hkvd` with its KV in the pool
   already, transformers, then the rest.
3. Each kernel's speed against its ceiling, and tiles and splits of prefill attention against SDPA by cuDNN and by
   flash.

Each step runs in a process of its own (`gpu/steps.py`); this process never touches the GPU. If a step's process dies,
hangs or loses the device, another continues with the next case. Rows are appended to STEM.jsonl as they are measured;
STEM.json and STEM.md, by default in benchmarks/results/, are rewritten after each step. Cases that a stage's --budget
has no time for are listed as left out. --resume continues a run with the same STEM; --again also repeats failed cases
and wrong numbers.

Exit code: 0; 1 if a number is wrong or a step failed; 2 if a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu.log import Budget, Log, assemble
from gpu.report import markdown, targets
from gpu.steps import HOPELESS, RESTART, Step, stage_steps

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("-m", "gpu.steps")
sys.path.insert(0, str(ROOT / "tests" / "support"))  # for `kernel_references`; child processes get the path, too
NEEDED = ("numpy", "safetensors", "tokenizers", "jinja2", "xxhash", "lmdb", "msgspec", "platformdirs")
LARGE = ("torch", "transformers", "triton")  # only located here; the steps that use them import them
GRACE_S = 20.0  # beyond a stage's budget, for the running case
SLOW_START_S = 240.0  # until a step's first line: it loads a model, compiles and fills a store
NO_TIME = "no time was left"
STORE_BYTES = 8 << 30


def main() -> int:
    arguments = parse()
    stem = out_stem(arguments)
    stem.parent.mkdir(parents=True, exist_ok=True)
    log = Log(stem.with_name(stem.name + ".jsonl"))
    started = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-gpu-", dir=store_dir(arguments)))
        if arguments.wheels is not None:  # not in a tmpfs, which may be mounted noexec
            install(arguments.wheels, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-site-"))))
        if lacking := missing(arguments.device):
            print(
                f"error: what does not import: {', '.join(lacking)}; bring wheels of them: --wheels FOLDER",
                file=sys.stderr,
            )
            return 2
        if arguments.resume:
            log.reopen(again=arguments.again)
        else:
            log.path.unlink(missing_ok=True)
        for stage in arguments.stages:
            budget = Budget(arguments.budget)
            steps = stage_steps(stage, arguments.tiny, processes_of(arguments))
            for _, group in groupby(steps, key=lambda step: step.together or step.name):
                together = list(group)
                names = together[0].together or together[0].name
                print(
                    f"stage {stage}, {names}, {budget.used:.0f} s of {budget.seconds:.0f} used",
                    file=sys.stderr,
                    flush=True,
                )
                with ThreadPoolExecutor(len(together)) as threads:
                    list(threads.map(lambda step: follow(step, arguments, log, budget, Path(folder)), together))  # noqa: B023
                try:
                    write(log, stem, arguments.tiny, time.monotonic() - started)
                except Exception:  # rows are safe in the log
                    traceback.print_exc()
    return summary(write(log, stem, arguments.tiny, time.monotonic() - started), stem)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that any CPU takes")
    parser.add_argument("--stages", type=stages, default=(1, 2, 3), help="which, for example 1,3 (all)")
    parser.add_argument("--resume", action="store_true", help="go on where a run with the same --out stopped")
    parser.add_argument("--again", action="store_true", help="with --resume: what failed or was wrong, too")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    parser.add_argument("--store-dir", type=Path, help="where the store goes (memory, where a GPU machine has enough)")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds a stage (500)")
    parser.add_argument("--processes", type=int, help="for the kernel checks (half the cores, 8 at most)")
    parser.add_argument("--out", type=Path, help="stem of the files that are written")
    return parser.parse_args()


def stages(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if not found or set(found) - {1, 2, 3}:
        raise argparse.ArgumentTypeError("1, 2 and 3 are the stages there are")
    return found


def install(wheels: Path, target: Path) -> None:
    """Install the wheels into a folder in front of sys.path; child processes inherit it."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"error: no wheels in {wheels}")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)
    sys.path.insert(0, str(target))


def missing(device: str) -> list[str]:
    """Return packages that do not import, so that a run fails before it uses its time."""
    found = [name for name in LARGE[: 3 if device.startswith("cuda") else 2] if importlib.util.find_spec(name) is None]
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name} ({error})")
    return found


def store_dir(arguments: argparse.Namespace) -> Path | None:
    """Return the folder for temporary files: --store-dir, or /dev/shm if it has room, else None for the system's."""
    memory = Path("/dev/shm")
    if arguments.store_dir is not None or arguments.device == "cpu":
        return arguments.store_dir
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > STORE_BYTES else None


def processes_of(arguments: argparse.Namespace) -> int:
    return int(arguments.processes or max(1, min(8, (os.cpu_count() or 1) // 2)))


def follow(step: Step, arguments: argparse.Namespace, log: Log, budget: Budget, folder: Path) -> None:
    """Run a step to its end, in as many processes as needed; each new one starts behind at least one more case."""
    while True:
        if budget.left <= 0:
            log.write(step.name, "", "skipped", message=NO_TIME)
            return
        before = len(log.over(step.name))
        command = [
            sys.executable,
            *STEPS,
            "--step",
            step.name,
            "--device",
            arguments.device,
            "--log",
            str(log.path),
        ]
        command += ["--folder", str(folder), "--seconds", f"{budget.left:.1f}"] + ["--tiny"] * arguments.tiny
        code, ended = run_child(command, log.path, step.quiet_s, budget.left + GRACE_S)
        unfinished = log.started(step.name) if code else []
        event = "skipped" if ended == NO_TIME else "fault"
        for case in unfinished:
            log.write(step.name, case, event, message=ended or f"the process ended with {code}")
        if code and not unfinished and code not in (RESTART, HOPELESS) and before == len(log.over(step.name)):
            log.write(step.name, "", event, message=ended or f"the process ended with {code} before its first case")
        if not code or before == len(log.over(step.name)):
            return


def run_child(command: list[str], log: Path, quiet_s: float, seconds: float) -> tuple[int, str]:
    """Return the exit code, and why the process was ended or "". It is ended after `seconds`, or if the log did not
    grow for quiet_s (SLOW_START_S before its first line)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline, size, heard = time.monotonic() + seconds, size_of(log), time.monotonic()
    patience = max(quiet_s, SLOW_START_S)
    try:
        while True:
            try:
                return child.wait(0.2), ""
            except subprocess.TimeoutExpired:
                now, grown = time.monotonic(), size_of(log)
            if grown != size:
                size, heard, patience = grown, now, quiet_s
            if now > deadline:
                return -9, NO_TIME
            if now - heard > patience:
                return -9, f"nothing came for {patience:.0f} s"
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGUSR1)  # print its stack
            time.sleep(1)
            os.killpg(child.pid, signal.SIGKILL)  # with its children
            child.wait()


def size_of(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def out_stem(arguments: argparse.Namespace) -> Path:
    """Return --out, or a stem that names the device."""
    if arguments.out is not None:
        return Path(arguments.out)
    name = "cpu" if arguments.device == "cpu" else gpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"gpu-{slug}{'-tiny' * arguments.tiny}"


def gpu_name() -> str:
    """Return the GPU's name from nvidia-smi: this process stays off the GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        found = []
    return found[0] if found else "cuda"


def write(log: Log, stem: Path, tiny: bool, seconds: float) -> dict[str, Any]:
    result = assemble(log.lines(), tiny) | {"seconds": seconds}
    full = {**result, "targets": [] if tiny else targets(result)}
    stem.with_name(stem.name + ".json").write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
    stem.with_name(stem.name + ".md").write_text(markdown(result), encoding="utf-8")
    return result


def summary(result: dict[str, Any], stem: Path) -> int:
    print(stem.with_name(stem.name + ".md").read_text(encoding="utf-8"))
    rows = [
        *result["checks"],
        *result["sanitizer"],
        *(row for model in result["end_to_end"] for row in model["checks"]),
    ]
    wrong = sum(not row["ok"] for row in rows)
    print(
        f"{len(rows) - wrong} of {len(rows)} checks hold, {len(result['faults'])} steps failed, "
        f"{len(result['skipped'])} left out; {stem}.json, {stem}.md",
        file=sys.stderr,
    )
    return 1 if wrong or result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
