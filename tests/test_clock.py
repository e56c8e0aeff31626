"""Seconds since process start."""

from __future__ import annotations

import subprocess
import sys
import time


def test_a_process_knows_when_it_started() -> None:
    """The age is at least the CPU time that one thread has used, and at most the time that the parent waited."""
    code = (
        "import time; from cacheblend_cli.clock import since_process_start; sum(range(3_000_000)); "
        "used = time.process_time(); print(used, since_process_start(time.perf_counter()))"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    elapsed = time.perf_counter() - start
    used, age = map(float, result.stdout.split())
    assert 0 < used <= age + 0.02  # the kernel counts the start in hundredths of a second
    assert age <= elapsed + 0.02
