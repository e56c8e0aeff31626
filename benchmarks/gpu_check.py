"""Everything that only a GPU can tell, in one command and less than eight minutes.

    python benchmarks/gpu_check.py [--wheels FOLDER] [--store-dir /dev/shm] [--out STEM]
    python benchmarks/gpu_check.py --device cpu --tiny --out /tmp/tiny

The machine needs Python, torch and triton; wheels of what else is missing (lmdb, xformers, platformdirs, ...) are installed
from FOLDER into a temporary one. In this order: the ceilings (copy bandwidth, bf16 matrix product), every kernel's numbers
against fp64, the two Llama shapes from question to answer, and each kernel's speed beside its ceiling. What --budget has no
time for is left out and said. STEM.json and STEM.md are written after every step, by default to benchmarks/results/.

Exit code: 0, or 1 when a number is wrong or a step failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_budget import Budget

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "xformers", "lmdb")


def main() -> int:
    arguments = parse()
    budget = Budget(arguments.budget)
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-", dir=arguments.store_dir) as folder:
        if arguments.wheels is not None:
            install(arguments.wheels, Path(folder) / "site")
        sys.path[:0] = [str(ROOT / part) for part in ("", "store", "kernels")]
        result, stem = blank(arguments), out_stem(arguments)
        for name, step in steps(arguments, result, budget, Path(folder)):
            print(f"{name}, {budget.used:.0f} s of {budget.seconds:.0f} used", file=sys.stderr, flush=True)
            try:
                step()
            except Exception as error:  # the other steps still have something to say
                traceback.print_exc()
                result["faults"].append(f"{name}: {type(error).__name__}: {error}")
            result["skipped"], result["seconds"] = budget.skipped, budget.used
            write(result, stem)
    return summary(result, stem)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that any CPU takes")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    parser.add_argument("--store-dir", type=Path, help="where temporary files and the store go; a tmpfs is best")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything (460)")
    parser.add_argument("--processes", type=int, help="for the kernel checks (half the cores, 8 at most)")
    parser.add_argument("--out", type=Path, help="stem of the two files that are written")
    return parser.parse_args()


def install(wheels: Path, target: Path) -> None:
    """Into a folder of this run's own, in front of everything; children find it too."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"error: no wheels in {wheels}")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)
    sys.path.insert(0, str(target))


def steps(
    arguments: argparse.Namespace, result: dict[str, Any], budget: Budget, folder: Path
) -> list[tuple[str, Callable[[], None]]]:
    """What is done, in order. The imports are here: before `install` they may not be possible."""
    import torch
    from gpu_end_to_end import FULL, TINY, measure_end_to_end
    from gpu_kernels import FAMILIES, measure_ceilings, measure_kernels
    from gpu_shares import checks_in_processes

    device, tiny = torch.device(arguments.device), arguments.tiny
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    result["hardware"] |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"}
    scenario = TINY if tiny else FULL
    processes = arguments.processes or max(1, min(8, (os.cpu_count() or 1) // 2))

    def ceilings() -> None:
        result["ceilings"] = measure_ceilings(device, tiny)

    def checks() -> None:
        seconds = budget.left if tiny else min(0.4 * budget.seconds, budget.left)
        rows, faults = checks_in_processes(str(device), tiny, processes, seconds, folder)
        result["checks"] += rows
        result["faults"] += faults

    def end_to_end(name: str) -> None:
        if budget.allows(0 if tiny else 40, f"{name} from question to answer"):
            found = measure_end_to_end(name, scenario, device, result["ceilings"], folder, budget, result["faults"])
            result["end_to_end"].append(found)

    def kernels(family: str) -> None:
        if budget.allows(0 if tiny else 12, f"the speed of {family}"):
            for row in measure_kernels(device, tiny, result["ceilings"], family):
                if "message" in row:
                    result["faults"].append(f"{row['kernel']} {row['case']}: {row['message']}")
                else:
                    result["kernels"].append(row)

    return [
        ("ceilings", ceilings),
        ("kernel checks", checks),
        *((name, lambda name=name: end_to_end(name)) for name in scenario.models),
        *((f"speed of {family}", lambda family=family: kernels(family)) for family in FAMILIES),
    ]


def blank(arguments: argparse.Namespace) -> dict[str, Any]:
    """A result before anything was measured."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    parts: dict[str, Any] = {"skipped": [], "faults": [], "ceilings": {}, "checks": [], "end_to_end": [], "kernels": []}
    return {"hardware": hardware(), "versions": versions, "tiny": arguments.tiny, "seconds": 0.0, **parts}


def hardware() -> dict[str, Any]:
    import torch

    from cacheblend_cli.evaluation.speed import device_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": device_name(torch.device("cpu")), "cores": os.cpu_count(), "memory_gib": round(memory)}


def out_stem(arguments: argparse.Namespace) -> Path:
    """The stem that was asked for, or one that names the device."""
    if arguments.out is not None:
        return Path(arguments.out)
    import torch

    name = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name(arguments.device)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"gpu-{slug}{'-tiny' * arguments.tiny}"


def write(result: dict[str, Any], stem: Path) -> None:
    from gpu_report import markdown, targets

    stem.parent.mkdir(parents=True, exist_ok=True)
    full = {**result, "targets": [] if result["tiny"] else targets(result)}
    stem.with_name(stem.name + ".json").write_text(json.dumps(plain(full), indent=1) + "\n", encoding="utf-8")
    stem.with_name(stem.name + ".md").write_text(markdown(result), encoding="utf-8")


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(result: dict[str, Any], stem: Path) -> int:
    print(stem.with_name(stem.name + ".md").read_text(encoding="utf-8"))
    rows = [*result["checks"], *(row for model in result["end_to_end"] for row in model["checks"])]
    wrong = sum(not row["ok"] for row in rows)
    print(
        f"{len(rows) - wrong} of {len(rows)} checks hold, {len(result['faults'])} steps failed, "
        f"{len(result['skipped'])} left out; {stem}.json, {stem}.md",
        file=sys.stderr,
    )
    return 1 if wrong or result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
