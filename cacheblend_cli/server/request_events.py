"""Pass events of a submitted request from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Self

from cacheblend_cli.engine.engine import Request
from cacheblend_cli.engine.events import Done, Event, Failed, Progress
from cacheblend_cli.server.api_errors import ApiError, server_stopping
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.types import Piece


class RequestEvents:
    """Events of a submitted request. Leaving the context before the last event cancels the request."""

    def __init__(self, state: ServerState, request: Request, *, with_progress: bool = False) -> None:
        """with_progress: yield Progress, too. Without it, an error before the answer is the first event. Raises
        QueueFull, UsageError."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self._state, self._queue, self._submitted, self._ended = state, queue, time.perf_counter(), False

        def put(event: Event) -> None:
            if with_progress or not isinstance(event, Progress):
                with suppress(RuntimeError):  # the event loop is already closed
                    loop.call_soon_threadsafe(queue.put_nowait, event)

        self._handle = state.engine.service.submit(request, put)
        self._end = lambda: queue.put_nowait(Failed(server_stopping()))
        state.on_end.add(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._state.on_end.discard(self._end)
        if not self._ended:
            self._state.engine.service.cancel(self._handle)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the end, Done last. Raises the error of a failed request, ApiError without an answer."""
        metrics, has_text = self._state.metrics, False
        while not self._ended:
            event = await self._queue.get()
            self._ended = isinstance(event, Done | Failed)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                for answer in event.answers:
                    metrics.answer(answer)
                check_answered(event)
            elif isinstance(event, Piece) and not has_text:
                has_text = True
                metrics.first_token(time.perf_counter() - self._submitted)
            yield event

    async def done(self) -> Done:
        """Return the last event. Raises the errors of `events`."""
        async for event in self.events():
            if isinstance(event, Done):
                return event
        raise AssertionError("a request must end with Done or Failed")


def check_answered(done: Done) -> None:
    """Raises ApiError if the event has no answer."""
    if done.ended == "cancelled":
        raise server_stopping()
    if not done.answers:
        raise ApiError(504, "the deadline passed before the answer began", code="timeout")
