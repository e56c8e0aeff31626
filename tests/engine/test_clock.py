"""The age of the process is that the system tells."""

from __future__ import annotations

import subprocess
import sys
import time


def test_a_process_knows_when_it_began() -> None:
    """Between what the parent sees before and after, whatever the child did before it looked."""
    code = (
        "import time; time.sleep(0.3); from cacheblend_cli.clock import since_process_start as age; "
        "print(age(time.perf_counter()))"
    )
    start = time.perf_counter()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    elapsed = time.perf_counter() - start
    assert 0.28 <= float(told) <= elapsed + 0.02  # the system counts in hundredths
