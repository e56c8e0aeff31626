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

from machine import RESULTS, ROOT, hardware, read_result, save
from machine import table as markdown

FOLDERS = ["tests/store", "tests/cli", "tests/server", "tests/corpus", "tests/documents"]
NOT_COUNTS = ("test", "date", "hardware")


def main(arguments: list[str]) -> int:
    tests = torture_tests()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        command = [sys.executable, "-m", "pytest", "-m", "torture", "--timeout=7200", *(arguments or FOLDERS)]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "TORTURE_LEDGER": str(ledger)}).returncode
        lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    results, machine = read_result(RESULTS / "torture.json"), hardware()
    where = f"{machine['cpu']}, {machine['cores']} cores"
    for line in lines:
        entry = json.loads(line)
        what = entry.pop("what")
        results[what] = {**entry, "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": where}
    results = {what: entry for what, entry in sorted(results.items()) if entry["test"] in tests}
    save(results, RESULTS / "torture.json", page(results))
    return code


def torture_tests() -> set[str]:
    """Return the names of all torture tests, as pytest gives them."""
    command = [sys.executable, "-m", "pytest", "-m", "torture", "--collect-only", "--quiet", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {line for line in listed.splitlines() if "::" in line}


def page(results: dict[str, Any]) -> str:
    """Return a table with a row per test: what was done, the outcome, and the date."""

    def counts(entry: dict[str, Any]) -> str:
        shown = {k: f"{v:,}" if isinstance(v, int | float) else str(v) for k, v in entry.items() if k not in NOT_COUNTS}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())

    rows = [(what, counts(entry), entry["date"]) for what, entry in sorted(results.items())]
    where = sorted({entry["hardware"] for entry in results.values()})
    head = "`make torture`: what these tests counted, each after its assertions held."
    return "\n".join([head, "", *markdown(("test", "counts", "date"), rows), "", f"Hardware: {'; '.join(where)}.", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
