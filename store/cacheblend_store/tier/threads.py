"""Daemon threads for requests to a tier. Process exit does not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Up to `count` daemon threads, started on demand."""

    def __init__(self, count: int, name: str) -> None:
        self._most, self._name, self._started, self._idle = count, name, 0, 0
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in one of the threads."""
        future: Future[T] = Future()
        self._work.put((work, future))
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del work, future  # release references while waiting for the next job
            with self._lock:
                self._idle += 1
