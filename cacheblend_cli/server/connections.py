"""HTTP connections with limits on their number and on slow clients."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend_cli.server.api_errors import ApiError


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

        now: time.monotonic(). late: seconds by which the event loop was delayed since the last check. Nothing could be
        read meanwhile, so deadlines move by as much.
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
