"""The store's torture tests: run them, and commit what they counted.

    python benchmarks/torture.py [PYTEST ARGUMENTS]

Runs `pytest -m torture tests/store tests/cli` and merges what the tests counted into benchmarks/results/torture.json and .md.
A test writes its line after its assertions held; a test that fails writes none, and the script exits as pytest does.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "torture",
            "--timeout=7200",
            *(arguments or ["tests/store", "tests/cli"]),
        ]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "TORTURE_LEDGER": str(ledger)}).returncode
        lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    path = RESULTS / "torture.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for line in lines:
        entry = json.loads(line)
        what = entry.pop("what")
        results[what] = {**entry, "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware()}
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (RESULTS / "torture.md").write_text(table(results), encoding="utf-8")
    return code


def hardware() -> str:
    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = (
            n.partition(":")[2].strip() for n in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in n
        )
        cpu = next(names, cpu)
    return f"{cpu}, {os.cpu_count()} cores"


def table(results: dict[str, Any]) -> str:
    """A row a test: what was done, and what came of it."""
    rows = ["| test | counts |", "|---|---|"]
    for what, entry in sorted(results.items()):
        counts = (
            f"{name.replace('_', ' ')} {_number(v)}" for name, v in entry.items() if name not in ("date", "hardware")
        )
        rows.append(f"| {what} | {', '.join(counts)} |")
    where = sorted({entry["hardware"] for entry in results.values()})
    head = "`make torture`: what the store's tests counted, each after its assertions held."
    return "\n".join([head, "", *rows, "", f"Hardware: {'; '.join(where)}.", ""])


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
