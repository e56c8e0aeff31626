"""Memory of this process."""

from __future__ import annotations

import os
from contextlib import suppress


def resident_bytes() -> int | None:
    """Return the bytes of memory that the process holds now; None where the system does not tell."""
    with suppress(OSError, IndexError, ValueError), open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
