"""Threads that load stored KV, and the queue they work on."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

Part = tuple[int, int]
"""A group of layers of a chunk: numbers of the group and of the chunk."""


class LoadQueue:
    """Work queue of the loader threads: parts in the order in which they are needed, so that the first group of layers
    is complete first.

    An error in any thread is raised in every waiter.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = deque(parts)  # to be taken
        self._missing = Counter(group for group, _ in parts)
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, may_begin: Callable[[Part], bool] = lambda part: True) -> Part | None:
        """Return the next part; None when nothing is left to do, or if the next part may not begin yet."""
        with self._changed:
            taken = not self._stopped and self._parts and may_begin(self._parts[0])
            return self._parts.popleft() if taken else None

    @property
    def is_taken(self) -> bool:
        """Return whether no part will be taken any more."""
        return self._stopped or not self._parts

    def arrived(self, group: int) -> None:
        """Record that one more part of the group is loaded."""
        with self._changed:
            self._missing[group] -= 1
            if self._missing[group] == 0:
                self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop handing out parts. Waiters get the first error."""
        with self._changed:
            self._stopped, self._error = True, self._error or error
            self._changed.notify_all()

    def is_ready(self, group: int) -> bool:
        """Return whether `wait` does not wait for a thread."""
        return self._error is not None or self._missing[group] == 0

    def wait(self, group: int) -> None:
        """Return when the whole group is loaded. Raises the error that stopped the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready(group))
            if self._error is not None:
                raise self._error


@cache
def workers(count: int) -> ThreadPoolExecutor:
    """Return `count` threads that live as long as the process, created on first use, each limited to one OpenMP thread.

    An OpenMP team per worker would compete with the computing thread's team for the cores.
    """
    pool = ThreadPoolExecutor(count, "kv-loader")
    begun = threading.Barrier(count + 1)  # each thread holds one task, so that no thread runs two of them
    before = torch.get_num_threads()
    for _ in range(count):
        pool.submit(_alone, begun)
    begun.wait()
    torch.set_num_threads(before)  # a worker's setting applies to itself and to threads started later
    return pool


def _alone(begun: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first query copies the global number: query before setting its own
    torch.set_num_threads(1)
    begun.wait()


def num_workers(at_most: int) -> int:
    """Half of the cores; the other half computes."""
    return max(1, min(at_most, (os.cpu_count() or 1) // 2))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.cache_clear)  # fork does not copy threads
