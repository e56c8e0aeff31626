"""Seconds since process start: the time that the user has waited."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

_imported = time.perf_counter()


def since_process_start(moment: float | None = None) -> float:
    """Return the seconds from process start to a `time.perf_counter()` value, by default now."""
    return (time.perf_counter() if moment is None else moment) - _started()


@cache
def _started() -> float:
    """Return the `perf_counter` value at process start, or at the import of this module if the kernel does not report
    it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _imported
    return time.perf_counter() - age
