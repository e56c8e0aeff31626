"""An engine that many ask at once."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.errors import CacheBlendError, QueueFull, UsageError
from cacheblend_cli.runtime.answer import Answer
from cacheblend_cli.runtime.ask import ask
from cacheblend_cli.runtime.generate import Listener
from cacheblend_cli.runtime.jobs import (
    Done,
    Event,
    Failed,
    Job,
    Limits,
    OnEvent,
    Reasoning,
    ServiceStats,
    Started,
    Text,
    Ticket,
)
from cacheblend_cli.runtime.request import resolve
from cacheblend_cli.runtime.runtime import Runtime

__all__ = [
    "Done", "Event", "Failed", "Job", "Limits", "OnEvent", "QueueFull", "Reasoning", "Service", "ServiceStats", "Started",
    "Text", "Ticket",
]  # fmt: skip

T = TypeVar("T")
logger = logging.getLogger("cacheblend")


class Service:
    """One thread of its own runs the engine; every method may be called from any thread.

    Events of a job are given to its on_event in the engine's thread, in order, exactly one Done or Failed last: on_event
    hands them on, and does not wait for anybody. Where it raises, the job is cancelled.
    """

    def __init__(self, runtime: Runtime, store: ChunkStore | None, limits: Limits | None = None) -> None:
        self._runtime, self._store, self._limits = runtime, store, limits or Limits()
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []  # a heap
        self._work: deque[tuple[Callable[[Runtime], Any], Future[Any]]] = deque()
        self._current: Ticket | None = None
        self._numbers = itertools.count()
        self._closing = False
        self._seconds = deque[float]([1.0], maxlen=16)  # of the last jobs
        self._stats = ServiceStats()
        self._thread = threading.Thread(target=self._loop, name="cacheblend-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job, on_event: OnEvent) -> Ticket:
        """Queue the job. Raises QueueFull when too many wait or the service closes, UsageError when it can never fit."""
        room = self._runtime.room(job.question.sampling)
        if room >= self._runtime.context:
            raise UsageError(
                f"an answer of up to {room} tokens does not fit the context of {self._runtime.model.name}, which is "
                f"{self._runtime.context}",
                "ask with a smaller --max-tokens",
            )
        with self._changed:
            if self._closing or len(self._waiting) >= self._limits.max_waiting:
                raise QueueFull(len(self._waiting), self._retry_after_s())
            ticket = Ticket(job, on_event, next(self._numbers))
            heapq.heappush(self._waiting, ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the job in the next step: it tells Done, with what was said. Of a finished one nothing happens."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify_all()

    def run(self, work: Callable[[Runtime], T]) -> Future[T]:
        """Have `work` done in the engine's thread, between two steps."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise QueueFull(len(self._waiting), self._retry_after_s())
            self._work.append((work, future))
            self._changed.notify_all()
        return future

    def stats(self) -> ServiceStats:
        with self._changed:
            return replace(self._stats, waiting=len(self._waiting), running=int(self._current is not None))

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more jobs. What is there may finish for so long, and is cancelled then. Returns when the thread has ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(grace_s)
        with self._changed:
            for ticket in [*self._waiting, self._current]:
                if ticket is not None:
                    ticket.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _retry_after_s(self) -> float:
        return sum(self._seconds) / len(self._seconds) * (len(self._waiting) + 1)

    def _loop(self) -> None:
        while (todo := self._next()) is not None:
            if isinstance(todo, Ticket):
                self._answer(todo)
            else:
                _do(self._runtime, *todo)

    def _next(self) -> Ticket | tuple[Callable[[Runtime], Any], Future[Any]] | None:
        """What is to be done now; waits for it. None: the service is closed."""
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._work or self._waiting or self._closing)
            if self._work:
                return self._work.popleft()
            if self._waiting:
                self._current = heapq.heappop(self._waiting)
            return self._current

    def _answer(self, ticket: Ticket) -> None:
        started = time.monotonic()
        if (ended := ticket.ended) is not None:
            self._tell(ticket, Done([], ended))
            return
        self._tell(ticket, Started())
        try:
            sampling = ticket.job.question.sampling
            answers = [self._one(ticket, index) for index in range(sampling.n)]
            self._tell(ticket, Done(answers))
        except _Ended:
            self._tell(ticket, Done([], ticket.ended))
        except (CacheBlendError, StoreError) as error:
            self._tell(ticket, Failed(error))
        except Exception as error:
            logger.exception("a job failed")
            self._tell(ticket, Failed(internal(error)))
        self._seconds.append(time.monotonic() - started)

    def _one(self, ticket: Ticket, index: int) -> Answer:
        job = ticket.job
        sampling = job.question.sampling
        seed = None if sampling.seed is None else sampling.seed + index
        question = replace(job.question, sampling=replace(sampling, n=1, seed=seed))

        def told(event: Event) -> None:
            self._tell(ticket, event)
            if ticket.ended is not None:
                raise _Ended

        return ask(
            self._runtime,
            resolve(self._runtime, self._store, question),
            Listener(lambda piece: told(Text(piece, index)), lambda piece: told(Reasoning(piece, index))),
            auto=job.auto,
            checked=job.verify,
            save_holes=job.save_holes,
        )

    def _tell(self, ticket: Ticket, event: Event) -> None:
        if isinstance(event, Done | Failed):
            kind = "failed" if isinstance(event, Failed) else "cancelled" if event.ended else "finished"
            with self._changed:
                self._stats = replace(self._stats, **{kind: getattr(self._stats, kind) + 1})
        try:
            ticket.on_event(event)
        except Exception:
            logger.exception("a job's listener failed")
            ticket.cancelled = True


class _Ended(Exception):
    """A job was cancelled, or its deadline has passed."""


def internal(error: Exception) -> CacheBlendError:
    """What is told of a fault of ours."""
    told = CacheBlendError(f"the engine failed: {type(error).__name__}: {error}", "this is a fault of cacheblend's")
    told.__cause__ = error
    return told


def _do(runtime: Runtime, work: Callable[[Runtime], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(runtime))
    except BaseException as error:
        future.set_exception(error)
