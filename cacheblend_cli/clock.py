"""Seconds since this process started, which is how long its user has waited."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

_imported = time.perf_counter()


def since_process_start(moment: float) -> float:
    """Seconds from the start of the process to a `time.perf_counter()`."""
    return moment - _started()


@cache
def _started() -> float:
    """The `perf_counter` at which the process began, as the kernel knows it; elsewhere when this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _imported
    return time.perf_counter() - age
