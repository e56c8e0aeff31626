"""Memory of this process."""

from __future__ import annotations

import os
from contextlib import suppress


def resident_bytes() -> int | None:
    """Return the resident memory of the process in bytes, None if the system does not report it."""
    with suppress(OSError, IndexError, ValueError), open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
