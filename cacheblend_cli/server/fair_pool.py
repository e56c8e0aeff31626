"""Threads for work of several tenants, who take turns."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]  # may hold megabytes of text, so it is dropped before the job
    future: Future[Any] = field(default_factory=Future)

    def forget(self) -> Callable[[], Any]:
        """Return the work, and drop the reference to it."""
        work, self.work = self.work, lambda: None
        return work

    def run(self) -> None:
        work = self.forget()
        if self.future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


class FairPool:
    """Daemon threads with a queue for each tenant, round robin; the work of one tenant begins in order.

    Cancelling a future drops its work from the queue. Process exit does not wait for these threads.
    """

    def __init__(self, name: str, num_threads: int, most_per_tenant: int | None = None) -> None:
        """most_per_tenant: threads that one tenant may use at a time, by default all."""
        self._name, self._num_threads = name, num_threads
        self._most_per_tenant = most_per_tenant or num_threads
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Job]] = {}  # by tenant, the next one in turn first; none is empty
        self._running = Counter[str]()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queue the work. The future is cancelled if the pool is closed."""
        job = _Job(work)
        with self._changed:
            if self._closed:
                job.future.cancel()
                return job.future
            self._queues.setdefault(tenant, deque()).append(job)
            if len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        job.future.add_done_callback(lambda future: self._drop(tenant, job) if future.cancelled() else None)
        return job.future

    def close(self, wait_s: float = 0.0) -> None:
        """Drop what is queued and take no more work. Wait at most wait_s for running work to end."""
        with self._changed:
            self._closed = True
            queued = [job for queue in self._queues.values() for job in queue]
            self._changed.notify_all()
        for job in queued:
            job.future.cancel()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            tenant, job = taken
            job.run()
            with self._changed:
                self._running[tenant] -= 1

    def _take(self) -> tuple[str, _Job] | None:
        """Wait for the next job and count it as running. Returns None when the pool is closed."""
        with self._changed:
            while not self._closed:
                free = (name for name in self._queues if self._running[name] < self._most_per_tenant)
                if (tenant := next(free, None)) is not None:
                    queue = self._queues.pop(tenant)
                    job = queue.popleft()
                    if queue:
                        self._queues[tenant] = queue  # behind all others
                    self._running[tenant] += 1
                    return tenant, job
                self._changed.wait()
            return None

    def _drop(self, tenant: str, job: _Job) -> None:
        job.forget()
        with self._changed:
            queue = self._queues.get(tenant, deque())
            if job in queue:
                queue.remove(job)
            if not queue:
                self._queues.pop(tenant, None)
