"""How long a run takes: by the speed of earlier runs on this machine, then by its own."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections import deque
from contextlib import suppress

from cacheblend_cli import user_cache
from cacheblend_cli.model.cpu import cpu_features
from cacheblend_cli.version import __version__

_GROUP_S = 0.2  # chunks that arrive this soon after the last one were committed with it
_WINDOW_S, _WINDOW_GROUPS = 30.0, 3  # the run's latest part, by which the rest is estimated: at least so long
_KNOWN_S, _KNOWN_SHARE = 10.0, 0.1  # of a run, from which its own speed is known
_CLOSE = 0.2  # relative difference of two speeds that is not worth a message
_LEAST_S = 5.0  # shorter runs say little about the next one
_KEPT_RUNS = 3


class CollectSpeed:
    """Measures a run, estimates how long the rest takes, and remembers the run's speed."""

    def __init__(self, fingerprint: str, machine: str) -> None:
        """machine: device, threads and other settings that change the speed."""
        about = platform.node(), platform.machine(), os.cpu_count(), cpu_features(), machine
        self._file = user_cache.place("collect", __version__, fingerprint, *about)
        self._left = self._done = 0  # rows
        self._now, self._seconds = 0.0, 0.0  # the last event, and the time spent on computing until then
        self._expected, self._is_known = 0.0, False  # the speed of earlier runs; whether the run's own is known
        self._groups = deque([(0.0, 0)])  # (seconds, rows done) at the start and after each group but the last

    @property
    def rows_per_s(self) -> float:
        """Speed of the fastest of the last runs, in rows of prefill; 0 if there are none. The others may have found the
        machine busy."""
        return max(self._earlier(), default=0.0)

    def begin(self, num_rows: int) -> None:
        """Start the clock of a run that computes so many rows."""
        self._left, self._now, self._expected = num_rows, time.perf_counter(), self.rows_per_s

    def count(self, num_rows: int, *, is_computed: bool = True) -> None:
        """Count the rows of a chunk that was just stored. is_computed: False for KV that was fetched."""
        before, self._now = self._now, time.perf_counter()
        self._left -= num_rows
        if not is_computed:
            return
        if self._done and self._now - before > _GROUP_S:
            self._groups.append((self._seconds, self._done))
            while len(self._groups) > _WINDOW_GROUPS + 1 and self._is_past:
                self._groups.popleft()
        self._done, self._seconds = self._done + num_rows, self._seconds + self._now - before

    @property
    def left_s(self) -> float:
        """Estimated seconds until the run ends, 0 if unknown."""
        (_, before), (_, done) = self._groups[0], self._groups[-1]
        usual = (done - before) / max(1, len(self._groups) - 1)  # rows of a group; the rest of this one is stored, too
        left = self._left - max(0.0, usual - (self._done - done))
        speed = self._own or self._expected
        return max(0.0, left) / speed if speed else 0.0

    def corrects(self) -> bool:
        """Return True once: when the run's own speed is known and is not that of earlier runs."""
        seconds, done = self._groups[-1]
        if self._is_known or not done or (seconds < _KNOWN_S and done < _KNOWN_SHARE * (self._done + self._left)):
            return False
        self._is_known = True
        return not 1 - _CLOSE < self._own / (self._expected or math.inf) < 1 + _CLOSE

    @property
    def _is_past(self) -> bool:
        """Whether the window is long enough without its first group. A run's first one also waits for the weights to be
        read from the disk."""
        return self._groups[0][1] == 0 or self._groups[1][0] <= self._seconds - _WINDOW_S

    @property
    def _own(self) -> float:
        """Speed of the run's latest part, 0 before the second group."""
        (start_s, before), (end_s, done) = self._groups[0], self._groups[-1]
        return (done - before) / (end_s - start_s) if done > before else 0.0

    def keep(self) -> None:
        """Remember the speed of this run, if it took long enough."""
        if self._seconds >= _LEAST_S:
            runs = [*self._earlier(), self._done / self._seconds]
            user_cache.keep(self._file, json.dumps(runs[-_KEPT_RUNS:]))

    def _earlier(self) -> list[float]:
        with suppress(ValueError, TypeError, OverflowError, RecursionError):
            runs = json.loads(user_cache.recall(self._file))
            return [speed for speed in map(float, runs) if 0 < speed < math.inf] if isinstance(runs, list) else []
        return []
