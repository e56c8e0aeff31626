"""Run the torture tests of store and server and write their counts.

    python benchmarks/torture.py [PYTEST ARGUMENTS]

Runs `pytest -m torture` over FOLDERS and merges the counts into benchmarks/results/torture.json
and .md. A test writes its line after its assertions; a failing test writes none, and the script exits as pytest does.
Lines of removed tests are dropped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cacheblend_cli.evaluation.speed import device_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["tests/store", "tests/cli", "tests/server", "tests/corpus", "tests/documents"]
RESULTS = ROOT / "benchmarks" / "results"
NOT_COUNTS = ("test", "date", "hardware")


def main(arguments: list[str]) -> int:
    tests = torture_tests()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "torture",
            "--timeout=7200",
            *(arguments or FOLDERS),
        ]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "TORTURE_LEDGER": str(ledger)}).returncode
        lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    path = RESULTS / "torture.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for line in lines:
        entry = json.loads(line)
        what = entry.pop("what")
        results[what] = {**entry, "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware()}
    results = {what: entry for what, entry in sorted(results.items()) if entry["test"] in tests}
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "torture.md").write_text(table(results), encoding="utf-8")
    return code


def torture_tests() -> set[str]:
    """Return the names of all torture tests, as pytest gives them."""
    command = [sys.executable, "-m", "pytest", "-m", "torture", "--collect-only", "--quiet", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {line for line in listed.splitlines() if "::" in line}


def hardware() -> str:
    return f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores"


def table(results: dict[str, Any]) -> str:
    """Return a table with a row per test: what was done, the outcome, and the date."""
    rows = ["| test | counts | date |", "|---|---|---|"]
    for what, entry in sorted(results.items()):
        counts = (
            f"{name.replace('_', ' ')} {_number(value)}" for name, value in entry.items() if name not in NOT_COUNTS
        )
        rows.append(f"| {what} | {', '.join(counts)} | {entry['date']} |")
    where = sorted({entry["hardware"] for entry in results.values()})
    head = "`make torture`: what these tests counted, each after its assertions held."
    return "\n".join([head, "", *rows, "", f"Hardware: {'; '.join(where)}.", ""])


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
