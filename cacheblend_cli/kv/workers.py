"""The threads that load KV."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch


class Workers:
    """Threads that live as long as the process. Each runs torch's operations by itself, whatever number of threads the
    computing thread uses: an OpenMP team of a worker's own would fight that one's for the cores."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "kv-loader")
        begun = threading.Barrier(count + 1)  # every thread is in one task: none takes two of them
        before = torch.get_num_threads()
        for _ in range(count):
            self._pool.submit(_alone, begun)
        begun.wait()
        torch.set_num_threads(before)  # what a worker set holds for it, and for threads that are born later

    def start(self, work: Callable[[], None], at_most: int) -> list[Future[None]]:
        """Have `work` done by every worker, or by so many of them."""
        return [self._pool.submit(work) for _ in range(min(self._count, at_most))]


def _alone(begun: threading.Barrier) -> None:
    torch.get_num_threads()  # a new thread takes the number for all when it first asks: not after it has its own
    torch.set_num_threads(1)
    begun.wait()


@cache
def workers(count: int) -> Workers:
    """The process's workers, made when they are first needed."""
    return Workers(count)


def num_workers(at_most: int) -> int:
    """Half of the cores: the others compute."""
    return max(1, min(at_most, (os.cpu_count() or 1) // 2))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.cache_clear)  # threads are not forked
