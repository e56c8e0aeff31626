"""What brings the stored KV of one prompt into the pool, whatever way that takes; and the threads and the queue that all ways share."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Self

import torch


class KVLoader(ABC):
    """Loads layer by layer, ahead of compute, from when it is entered until it is left.

    num_bytes: read from the source. load_s: from the start until the last layer was there. stall_s: how long computing
    waited of that. All three are final after the last wait; on a GPU asking for seconds waits for the device.
    """

    num_bytes = 0

    @property
    def load_s(self) -> float:
        return 0.0

    @property
    def stall_s(self) -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:  # noqa: B027
        """Nothing is loaded any more."""

    @abstractmethod
    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool for whatever is queued next. Raises BadChunk."""


class NothingToLoad(KVLoader):
    """Of a prompt that is computed as a whole."""

    def wait(self, layer: int) -> None:
        return


class LoadQueue:
    """Threads take parts of layers, layer by layer, so that layer 0 is complete first, and say what has arrived; the computing
    thread waits for a layer. An error of any thread reaches whoever waits."""

    def __init__(self, num_layers: int, num_parts: int) -> None:
        self._num_layers, self._num_parts = num_layers, num_parts
        self._taken = 0
        self._missing = [num_parts] * num_layers
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self) -> tuple[int, int] | None:
        """The next (layer, part). None: there is nothing left to do."""
        with self._changed:
            if self._stopped or self._taken == self._num_layers * self._num_parts:
                return None
            self._taken += 1
            return divmod(self._taken - 1, self._num_parts)

    def arrived(self, layer: int) -> None:
        """One more part of the layer is there."""
        with self._changed:
            self._missing[layer] -= 1
            if self._missing[layer] == 0:
                self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Nothing more is taken. Whoever waits gets the first error there was."""
        with self._changed:
            self._stopped, self._error = True, self._error or error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when all of the layer is there. Raises the error that stopped the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._missing[layer] == 0)
            if self._error is not None:
                raise self._error


class Workers:
    """`count` threads that live as long as the process. Each runs torch's operations by itself, whatever number of threads the
    computing thread uses: an OpenMP team of a worker's own would fight that one's for the cores."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "kv-loader")
        begun = threading.Barrier(count + 1)  # every thread is in one task: none takes two of them
        before = torch.get_num_threads()
        for _ in range(count):
            self._pool.submit(_alone, begun)
        begun.wait()
        torch.set_num_threads(before)  # what a worker set holds for it, and for threads that are born later

    def start(self, work: Callable[[], None], at_most: int) -> list[Future[None]]:
        """Have `work` done by every worker, or by so many of them."""
        return [self._pool.submit(work) for _ in range(min(self.count, at_most))]


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
