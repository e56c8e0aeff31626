"""The speed at which this machine collected with a model in its last runs, in the user's cache."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress

from cacheblend_cli import user_cache
from cacheblend_cli.version import __version__

_LEAST_S = 2.0  # shorter runs say little
_GROUP_S = 0.2  # chunks that arrive this soon after the first one were committed with it
_DECAY = 0.5  # most weight of earlier runs


class CollectSpeed:
    """Measures a run, and remembers the tokens and seconds of the last ones."""

    def __init__(self, fingerprint: str, machine: str) -> None:
        """machine: device, threads and other settings that change the speed."""
        about = platform.node(), platform.machine(), os.cpu_count(), machine
        self._file = user_cache.place("collect", __version__, fingerprint, *about)
        self._first: float | None = None  # when the first chunks were stored; what loaded before does not count
        self._seconds = self._tokens = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of the earlier runs, 0 if there are none."""
        tokens, seconds = self._earlier()
        return tokens / seconds if seconds else 0.0

    def count(self, num_tokens: int) -> None:
        """Add tokens whose computation has just ended."""
        now = time.perf_counter()
        if self._first is None or (not self._tokens and now - self._first < _GROUP_S):
            self._first = self._first or now
        else:
            self._tokens, self._seconds = self._tokens + num_tokens, now - self._first

    def keep(self) -> None:
        """Remember this run, if it took long enough."""
        if self._seconds >= _LEAST_S:
            tokens, seconds = self._earlier()
            weight = min(_DECAY, self._seconds / seconds) if seconds else 0.0  # at most as much as this run
            kept = self._tokens + weight * tokens, self._seconds + weight * seconds
            user_cache.keep(self._file, json.dumps(kept))

    def _earlier(self) -> tuple[float, float]:
        with suppress(ValueError, TypeError):
            tokens, seconds = map(float, json.loads(user_cache.recall(self._file)))
            if tokens > 0 and seconds > 0:
                return tokens, seconds
        return 0.0, 0.0
