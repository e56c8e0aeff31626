"""Memory of the host, a container's limit included."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_memory() -> int:
    """Return the bytes of memory that processes here may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max": no limit
        total = min(total, int(CONTAINER_LIMIT.read_text()))
    return total


def available_memory() -> int | None:
    """Return the bytes that can be taken without swapping; None where the system does not tell (other than Linux)."""
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return min(int(lines["MemAvailable"].split()[0]) << 10, total_memory())
    except (OSError, ValueError, KeyError):
        return None
