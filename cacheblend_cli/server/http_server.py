"""The HTTP server process: bind sockets and serve until a signal, --stop or --idle-exit, with limits on connections."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend_cli.model.host_memory import is_short_for, resident_memory
from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.warm_socket import WarmSocket


def default_connections() -> int:
    """Return half of the process's file descriptor limit, at most 1024; the store and the model need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(8, min(1024, soft // 2))


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's TCP connections. Times in seconds."""

    connections: int = field(default_factory=default_connections)  # at once
    headers_s: float = 10.0  # to send the headers, from the connection or their first byte
    body_s: float = 20.0  # to send the body, plus one second for every body_bytes_s bytes received
    body_bytes_s: int = 16 << 10
    linger_s: float = 5.0  # read and drop a refused body, so that the client sees the response
    read_s: float = 60.0  # for the client to read a full send buffer


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with ConnectionLimits. `check`, called periodically, closes connections over a limit."""

    def __init__(self, limits: ConnectionLimits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._received = 0
        self._began: float | None = time.monotonic()  # start of the request; None while a kept-alive connection is idle
        self._answered = self._blocked_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_tcp = sum(isinstance(one, LimitedProtocol) and one._is_tcp for one in self.connections)
        if self._is_tcp and num_tcp > self._limits.connections:
            transport.write(_refusal())
            transport.close()

    @property
    def _is_tcp(self) -> bool:
        return self.server is not None and self.server[1] is not None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._began is None:
            self._began, self._received = time.monotonic(), 0
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._answered = time.monotonic()
        if not self.cycle.more_body:
            pipelined, _ = self.conn.trailing_data
            self._began, self._received = (self._answered if pipelined else None), 0
        super().on_response_complete()

    def check(self, now: float, late: float = 0.0) -> None:
        """Close the connection if the client is too slow.

        now: time.monotonic(). late: seconds by which the event loop was delayed since the last check. No data could be
        read meanwhile, so deadlines move by that time.
        """
        if late > 0:
            self._answered += late
            self._began = None if self._began is None else self._began + late
            self._blocked_since = self._blocked_since and self._blocked_since + late
        self._blocked_since = (self._blocked_since or now) if self.flow.write_paused else 0.0
        if self._blocked_since and now - self._blocked_since > self._limits.read_s:
            self.transport.abort()
        elif now > self._deadline:
            self.transport.close()

    def abort_reply(self) -> None:
        """Close the connection immediately if its response is incomplete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()

    @property
    def _deadline(self) -> float:
        """Time by which the client must send more."""
        limits, cycle = self._limits, self.cycle
        if cycle is not None and cycle.more_body and cycle.response_complete:
            return self._answered + limits.linger_s
        if self._began is None:
            return float("inf")
        if cycle is not None and cycle.more_body:
            return self._began + limits.headers_s + limits.body_s + self._received / limits.body_bytes_s
        if cycle is None or cycle.response_complete:
            return self._began + limits.headers_s
        return float("inf")


def _refusal() -> bytes:
    error = ApiError(503, "the server has too many connections", code="too_many_connections")
    body = json.dumps(error.body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_POLL_S = 0.25
_ERROR_S = 3  # for clients to read the error of a cancelled answer
_BACKLOG = 128
logger = logging.getLogger("cacheblend")


class Server(uvicorn.Server):
    """Serve until SIGINT, SIGTERM, --stop or --idle-exit. A second SIGINT stops without waiting for answers.
    idle_exit_s: stop after this time without a request, and when the store is gone; 0: never. yields_memory: stop also
    when memory is short and no request is running. grace_s: time for answers to finish when stopping."""

    def __init__(
        self,
        app: Starlette,
        state: ServerState,
        warm: WarmSocket,
        *,
        grace_s: float,
        idle_exit_s: float,
        yields_memory: bool = False,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._state, self._warm, self._grace_s, self._idle_exit_s = state, warm, grace_s, idle_exit_s
        self._yields_memory = yields_memory

        async def by_socket(scope: Any, receive: Any, send: Any) -> None:
            await (warm.app if warm.owns(scope["server"]) else app)(scope, receive, send)

        config = uvicorn.Config(
            by_socket,
            http=partial(LimitedProtocol, limits or ConnectionLimits()),  # type: ignore[arg-type]
            ws="none",
            log_level="error",  # clients could fill the disk with warnings about malformed requests
            log_config=None,  # uvicorn's closes all handlers: absl's closes stderr
            lifespan="off",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_ERROR_S,
        )
        super().__init__(config)
        warm.on_stop, warm.idle_exit_s = self.end, idle_exit_s

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these sockets and the warm socket. Closes them."""
        beside = [asyncio.create_task(self._watch()), asyncio.create_task(self._warm.idle.run())]
        try:
            await super().serve([*(sockets or ()), self._warm.socket])
        finally:
            for task in beside:
                task.cancel()

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            late, last = now - last - 2 * _POLL_S, now
            for connection in self.connections:
                if not self._warm.owns(connection.server):  # the command line may read slowly
                    connection.check(now, max(0.0, late))
            is_idle = not self._state.finishing and self._state.idle_s >= self._idle_exit_s
            if self._idle_exit_s and (is_idle or not self._warm.is_in_place):
                self.end()
            elif self._yields_memory and self._state.idle_s and not self.should_exit and _memory_is_short():
                logger.warning("memory is short: the engine ends")
                self.end()

    @property
    def connections(self) -> list[LimitedProtocol]:
        return [one for one in self.server_state.connections if isinstance(one, LimitedProtocol)]

    def end(self) -> None:
        self._state.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish and refuse new requests; keep listening meanwhile, so that /ready returns 503. After
        grace_s, the remaining answers are cancelled with an error; clients that do not read it are disconnected."""
        self._warm.leave()
        await self._requests_end(self._grace_s)
        if self._state.active and not self.force_exit:
            logger.warning("the server is stopping; cancelled answers: %d", self._state.active)
            self._state.engine.service.cancel_all()
            await self._requests_end(_ERROR_S)
        self._state.end_requests()  # that the engine has not ended
        await self._requests_end(_ERROR_S)
        for connection in self.connections:
            connection.abort_reply()
        await super().shutdown(sockets)

    async def _requests_end(self, within_s: float) -> None:
        """Wait at most within_s until no request is in progress."""
        until = time.monotonic() + within_s
        while self._state.active and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals like uvicorn, but do not raise them again: store and engine are still to be closed."""
        before: dict[int, Any] = {}
        with suppress(ValueError):  # not in the main thread (tests)
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _memory_is_short() -> bool:
    return is_short_for(resident_memory() or 0)
