"""The thread in which an engine core runs concurrent requests."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from cacheblend_kernels import KernelError
from cacheblend_store import StoreError

from cacheblend_cli.cancellation import Cancelled
from cacheblend_cli.engine.core.core import EngineCore, Features
from cacheblend_cli.engine.core.sequence import RequestState, SequenceStatus
from cacheblend_cli.engine.events import Done, EngineStats, Event, Failed, Limits, OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import CacheBlendError, QueueFull, UsageError
from cacheblend_cli.model.device import make_current
from cacheblend_cli.types import Answer

T = TypeVar("T")
logger = logging.getLogger("cacheblend")
STUCK_S = 60.0
"""Seconds after which a step counts as stuck; a slice of a prefill on a slow CPU takes a few."""


class AsyncEngine:
    """Runs an engine core in one thread. Every method may be called from any thread. A request's events are passed to
    its on_event in the engine's thread, in order; the last one is Done or Failed. on_event must not block. If it
    raises, the request is cancelled."""

    def __init__(self, runtime: Runtime, limits: Limits | None = None, features: Features = Features()) -> None:
        self._runtime, self._limits = runtime, limits or Limits()
        self._core = EngineCore(runtime, self._limits, features=features, aside=self._aside)
        self._reviewer = ThreadPoolExecutor(1, "cacheblend-review")
        self._changed = threading.Condition()
        self._arrived = deque[RequestState]()
        self._listeners: dict[RequestState, OnEvent] = {}  # of unfinished requests
        self._work = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._numbers = itertools.count()
        self._closing = False
        self._seconds = deque[float]([1.0], maxlen=16)  # between the ends of the last requests
        self._last_end = time.monotonic()
        self._stats = self._snapshot()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._loop, name="cacheblend-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> RequestState:
        """Queue the request. Raises QueueFull if too many wait or the engine closes. An impossible request, such as a
        prompt that is too long, gets the single event Failed."""
        with self._changed:
            self.check_room()
            state = RequestState(request, next(self._numbers))
            self._listeners[state] = on_event
            self._arrived.append(state)
            self._changed.notify_all()
        return state

    def check_room(self, coming: int = 0) -> None:
        """Raise QueueFull if the queue has no room for one more request after `coming` others, or the engine closes."""
        with self._changed:
            waiting = self._num_waiting + coming
            if self._closing or waiting >= self._limits.max_waiting:
                raise QueueFull(waiting, sum(self._seconds) / len(self._seconds) * (waiting + 1))

    def ask(self, request: Request) -> Future[Answer]:
        """`submit`, and return a future of the first answer. Cancelling it cancels the request."""
        answered: Future[Answer] = Future()

        def on_event(event: Event) -> None:
            if not isinstance(event, Done | Failed) or not answered.set_running_or_notify_cancel():
                return
            if isinstance(event, Failed):
                answered.set_exception(event.error)
            elif event.answers:
                answered.set_result(event.answers[0])
            else:
                answered.set_exception(UsageError("the engine was closed before the answer", "keep it open until then"))

        state = self.submit(request, on_event)
        answered.add_done_callback(lambda future: self.cancel(state) if future.cancelled() else None)
        return answered

    def cancel(self, state: RequestState) -> None:
        """End the request in the next step, with its partial answers. No effect on a finished one."""
        state.cancelled = True

    def cancel_all(self) -> None:
        with self._changed:
            for state in self._listeners:
                state.cancelled = True

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the engine's thread, at most one launch per call. A step runs between two calls, so that
        answers continue. Raises QueueFull if the engine closes."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise QueueFull(len(self._listeners), 1.0)
            self._work.append((work, future))
            self._changed.notify_all()
        return future

    def check_unwanted(self) -> None:
        """Raise Cancelled if a request or other work waits for the engine's thread. For work between two steps that
        can be repeated. Each call restarts the time after which a step counts as stuck."""
        if self._arrived or self._work or self._closing or self._core.busy:
            raise Cancelled
        self._step_began = time.monotonic()

    def stats(self) -> EngineStats:
        """Statistics as of the last step."""
        with self._changed:
            return replace(self._stats, waiting=self._num_waiting)

    @property
    def busy_s(self) -> float:
        """Seconds that the current step has been running, 0 between two steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def is_stuck(self) -> bool:
        """Return whether the current step has been running for too long."""
        return self.busy_s > STUCK_S

    def close(self, grace_s: float = 0.0, give_up_s: float = STUCK_S) -> bool:
        """Take no more requests. Running ones may finish within grace_s, then they are cancelled. Returns whether the
        thread has ended within another give_up_s; a stuck step is left to the end of the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(grace_s)
        self.cancel_all()
        self._thread.join(give_up_s)
        self._reviewer.shutdown(wait=False)
        if self._thread.is_alive():
            logger.error("the engine did not stop: one step has been running for %.0f seconds", self.busy_s)
        return not self._thread.is_alive()

    @property
    def _num_waiting(self) -> int:
        return sum(not state.begun for state in self._listeners)

    def _loop(self) -> None:
        make_current(self._runtime.decoder.device)
        while self._wait():
            self._step_began = time.monotonic()
            self._take_in()
            self._step_began = time.monotonic()
            try:
                for state, event in self._core.step():
                    self._emit(state, event)
            except Exception as error:
                logger.exception("a step of the engine failed")
                self._fail_all(error)
            self._step_began = None
            with self._changed:
                self._stats = self._snapshot()

    def _fail_all(self, error: Exception) -> None:
        """End all requests with the error of a whole step: what it left of their KV is unknown."""
        states = self._core.drop_all()
        for state, event in self._core.flush():  # of earlier parts of the step
            self._emit(state, event)
        for state in states:
            if state in self._listeners:
                self._core.counts.failed += 1
                self._emit(state, Failed(error))

    def _wait(self) -> bool:
        """Wait for work, and prepare for later requests meanwhile. Returns False when the engine is closed."""
        core = self._core
        while not self._is_due() and core.worker.prepare():
            pass
        with self._changed:
            self._changed.wait_for(self._is_due)
            return not self._closing or bool(core.busy or self._arrived or self._work)

    def _is_due(self) -> bool:
        """Return whether there is something to do, or the engine closes."""
        core = self._core
        has_work = (core.busy and not core.waits) or self._arrived or self._work
        return bool(has_work or (self._closing and not core.busy))

    def _aside(self, work: Callable[[], object]) -> Future[Any]:
        """Run `work` in another thread, and wake the engine's at its end."""
        future = self._reviewer.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take_in(self) -> None:
        """Queue new requests, and run one work item."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
            work = self._work.popleft() if self._work else None
        for state in arrived:
            try:
                self._core.add(state)
            except Exception as error:
                self._core.counts.failed += 1
                self._emit(state, Failed(error))
        if work is not None:
            for state, event in self._core.flush():  # tokens must not wait for a launch
                self._emit(state, event)
            call, future = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    def _emit(self, state: RequestState, event: Event) -> None:
        if isinstance(event, Failed):
            event = Failed(_public_error(event.error))
        with self._changed:
            on_event = self._listeners[state]
            if isinstance(event, Done | Failed):
                del self._listeners[state]
                now = time.monotonic()
                self._seconds.append(now - max(state.submitted, self._last_end))
                self._last_end = now
                self._stats = self._snapshot()
        try:
            on_event(event)
        except Exception:
            logger.exception("a request's listener failed")
            state.cancelled = True

    def _snapshot(self) -> EngineStats:
        scheduler, allocator = self._core.scheduler, self._core.blocks.space.allocator
        block_bytes, cache = self._core.block_bytes, self._core.worker.host_cache
        return replace(
            self._core.counts,
            running=len(scheduler.with_status(SequenceStatus.RUNNING)),
            swapped=len(scheduler.with_status(SequenceStatus.SWAPPED)),
            swap_bytes=scheduler.num_swapped * block_bytes,
            swap_space_bytes=scheduler.swap_blocks * block_bytes,
            pool_bytes=(allocator.num_free + allocator.num_used) * block_bytes,
            blocks_free=allocator.num_free - allocator.num_cached,
            blocks_used=allocator.num_used,
            blocks_cached=allocator.num_cached,
            **({} if cache is None else cache.counts),
        )


def _public_error(error: Exception) -> Exception:
    """Return the error that users see. Unknown ones are logged and wrapped."""
    if isinstance(error, CacheBlendError | StoreError | KernelError):
        return error
    logger.error("a request failed", exc_info=error)
    wrapped = CacheBlendError(f"the engine failed: {type(error).__name__}: {error}", "this is a bug in cacheblend")
    wrapped.__cause__ = error
    return wrapped
