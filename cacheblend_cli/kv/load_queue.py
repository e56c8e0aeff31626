"""Threads that load stored KV, and the queue they work on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import torch


class LoadQueue:
    """Work queue of the loader threads: parts of layers, in layer order, so that layer 0 is complete first.

    The computing thread waits for a layer, and meanwhile runs its share of the work on arrived parts. An
    error in any thread is raised in every waiter.
    """

    def __init__(self, num_layers: int, num_parts: int) -> None:
        self._parts = product(range(num_layers), range(num_parts))  # to be taken
        self._missing = [num_parts] * num_layers
        self._left: list[Callable[[], None]] = []
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self) -> tuple[int, int] | None:
        """Return the next (layer, part), or None when nothing is left to do."""
        with self._changed:
            return None if self._stopped else next(self._parts, None)

    def arrived(self, layer: int, rest: Callable[[], None] | None = None) -> None:
        """Record that one more part of the layer is loaded, except for `rest`, which the computing thread runs."""
        with self._changed:
            self._missing[layer] -= 1
            if rest is not None:
                self._left.append(rest)
            if rest is not None or self._missing[layer] == 0:
                self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop handing out parts. Waiters get the first error."""
        with self._changed:
            self._stopped, self._error = True, self._error or error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when the whole layer is loaded. Raises the error that stopped the queue."""
        while not self.is_ready(layer):
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or self._left or self._missing[layer] == 0)

    def is_ready(self, layer: int) -> bool:
        """Run the rest of arrived parts, which later parts may wait for, and return whether the whole layer is loaded.
        Raises the error that stopped the queue."""
        with self._changed:
            if self._error is not None:
                raise self._error
            complete, left, self._left = self._missing[layer] == 0, self._left, []
        for rest in left:
            rest()
        return complete


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
