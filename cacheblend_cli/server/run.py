"""The process that serves: bind sockets, answer requests until a signal, --stop or --idle-exit ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from cacheblend_cli.client import Connection
from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.connections import ConnectionLimits, LimitedProtocol
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.server.warm import WarmSocket

_LOOK_S = 0.25
_TOLD_S = 3  # for clients to receive the error of a cancelled answer
_BACKLOG = 128
logger = logging.getLogger("cacheblend")


def bind_tcp(name: str, port: int) -> socket.socket:
    """It listens from now on, so that nobody else gets the address: who connects waits until it is served.

    Raises UsageError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((name, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {name}:{port}: {error.strerror}", "choose another --port; 0 takes a free one"
        ) from error
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A socket that only this user may use (0600), which listens from now on. One that was left behind is replaced.

    Raises UsageError when somebody listens there, or nothing can be made there.
    """
    if Connection.is_open(path):
        raise UsageError(f"a server listens on {path} already", "cacheblend serve --status tells of it, --stop ends it")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    before = os.umask(0o177)
    try:
        if path.exists() and not path.is_socket():
            raise OSError(0, "something else is there")
        new.unlink(missing_ok=True)
        bound.bind(os.fspath(new))
        bound.listen()
        new.rename(path)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}", "choose a shorter path, where you may write"
        ) from error
    finally:
        os.umask(before)
    return bound


def remover(path: Path) -> Callable[[], None]:
    """Return a function that removes the socket now at the path. One put there by a later server stays: the earlier one
    may still finish answers when it begins."""

    def there() -> tuple[int, int] | None:
        with suppress(OSError):
            info = path.lstat()
            return info.st_ino, info.st_ctime_ns
        return None

    own = there()

    def remove() -> None:
        if there() == own:
            path.unlink(missing_ok=True)

    return remove


class Server(uvicorn.Server):
    """Serves until SIGINT, SIGTERM, `--stop` or --idle-exit, and returns; a second SIGINT waits for no answer.

    idle_exit_s: end after so many seconds without a request, 0 never. grace_s: seconds for answers to finish at the
    end.
    """

    def __init__(
        self,
        app: Starlette,
        host: ServerState,
        warm: WarmSocket,
        *,
        grace_s: float,
        idle_exit_s: float,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._host, self._warm, self._grace_s, self._idle_exit_s = host, warm, grace_s, idle_exit_s

        async def by_socket(scope: Any, receive: Any, send: Any) -> None:
            await (warm.app if warm.owns(scope["server"]) else app)(scope, receive, send)

        config = uvicorn.Config(
            by_socket,
            http=partial(LimitedProtocol, limits or ConnectionLimits()),  # type: ignore[arg-type]
            ws="none",
            log_level="error",  # a warning for every malformed request would let strangers fill the disk
            log_config=None,  # its own closes every handler there is: absl's takes stderr with it
            lifespan="off",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_TOLD_S,
        )
        super().__init__(config)
        warm.on_stop = self.end

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve at these sockets and the warm one. Closes them."""
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        watch = asyncio.create_task(self._watch())
        try:
            await super().serve([*(sockets or ()), self._warm.socket])
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            late, looked = now - looked - 2 * _LOOK_S, now
            for connection in self.connections:
                if not self._warm.owns(connection.server):  # a command reads an answer when its turn comes
                    connection.check(now, max(0.0, late))
            if self._idle_exit_s and self._host.idle_s >= self._idle_exit_s:
                self.end()

    @property
    def connections(self) -> list[LimitedProtocol]:
        return [one for one in self.server_state.connections if isinstance(one, LimitedProtocol)]

    def end(self) -> None:
        self._host.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish, refuse new ones, and keep listening meanwhile, so that /ready is seen at 503. What is
        left after grace_s is cancelled with an error; a client that does not read that is cut off."""
        self._warm.leave()
        await self._requests_end(self._grace_s)
        if self._host.active and not self.force_exit:
            logger.warning("the server stops; answers cut off: %d", self._host.active)
            self._host.engine.cancel_all()
            await self._requests_end(_TOLD_S)
        self._host.end_requests()  # those that the engine has not ended
        await self._requests_end(_TOLD_S)
        for connection in self.connections:
            connection.abort_reply()
        await super().shutdown(sockets)

    async def _requests_end(self, within_s: float) -> None:
        """Wait until no request is in progress, within_s at most."""
        until = time.monotonic() + within_s
        while self._host.active and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals like uvicorn, without raising them again at the end, where store and engine are still to be
        closed."""
        before: dict[int, Any] = {}
        with suppress(ValueError):  # in a thread of a test there are no signals
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class LoopErrors:
    """Exception handler of the event loop: connections that cannot be accepted are logged once a minute, in one
    line."""

    def __init__(self) -> None:
        self._logged = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged > 60:
            self._logged = time.monotonic()
            logger.error("connections cannot be accepted: %s", context.get("exception"))
