"""Is a figure this machine's own? What other processes took of its CPUs while one was measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

MOST_USED = 0.2
"""CPUs that others may use while a figure that is kept is measured."""


class Others:
    """What processes that are not ours use, from now on, in CPUs: 1.0 is one core. Ours count once they have ended."""

    def __init__(self) -> None:
        self._start = self._now()

    def used(self) -> float:
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / wall

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in own)
