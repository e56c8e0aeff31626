"""Memory of the host, a container's limit included."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt's settings in glibc's malloc.h
MOST_KEPT = (32 << 20) - (64 << 10)
"""Bytes of the largest tensor whose memory malloc keeps for the next: a larger one costs page faults each time."""
MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
PRESSURE = Path("/proc/pressure/memory")
_MOST_PRESSURE = 10.0  # percent of the last ten seconds in which some process waited for memory


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
        return min(int(lines["MemAvailable"].split()[0]) << 10, total_memory() - _used_by_container())
    except (OSError, ValueError, KeyError):
        return None


def resident_memory(pid: int | None = None) -> int | None:
    """Return the bytes of memory that a process uses now, by default this one; None where the system does not tell."""
    with suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def is_short_for(held: int) -> bool:
    """Return whether less memory is available than `held` bytes, or programs wait for memory (PSI)."""
    with suppress(OSError, IndexError, ValueError):  # "some avg10=0.00 avg60=..."
        if float(PRESSURE.read_text().split("avg10=")[1].split()[0]) > _MOST_PRESSURE:
            return True
    available = available_memory()
    return available is not None and available < held


def _used_by_container() -> int:
    """Return the bytes that a container with a limit uses, without file pages that it can drop; 0 without a limit."""
    with suppress(OSError, ValueError, KeyError):
        int(CONTAINER_LIMIT.read_text())
        used = int(CONTAINER_LIMIT.with_name("memory.current").read_text())
        lines = CONTAINER_LIMIT.with_name("memory.stat").read_text().splitlines()
        return max(0, used - int(dict(line.split() for line in lines)["inactive_file"]))
    return 0


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory of up to 256 MiB for the next allocation. By default it gives activations
    back to the system after every layer, and a page fault for each 4 KiB of the next took a fifth of a prefill. Does
    nothing with another C library, or where the user has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_."""
    set_by_user = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if set_by_user:
        return
    with suppress(AttributeError, OSError, TypeError):  # no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest value that every glibc takes: see MOST_KEPT
        mallopt(_TRIM_THRESHOLD, 256 << 20)
