"""A run's time: what does not fit is left out, and said."""

from __future__ import annotations

import sys
import time


class Budget:
    """Seconds from now on. `skipped`: what was left out."""

    def __init__(self, seconds: float) -> None:
        self._start, self.seconds = time.monotonic(), seconds
        self.skipped: list[str] = []

    @property
    def used(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def take_skipped(self) -> list[str]:
        """What was left out since the last time this was asked."""
        taken, self.skipped = self.skipped, []
        return taken

    def allows(self, seconds: float, what: str) -> bool:
        """Whether there is time for something that takes about so long; if not, it is noted."""
        if seconds <= self.left:
            return True
        self.skipped.append(what)
        print(f"  left out, {max(0.0, self.left):.0f} s are left: {what}", file=sys.stderr, flush=True)
        return False
