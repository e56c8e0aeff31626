"""The process that serves: sockets bound, requests answered until it is told to end, or nobody has asked for long."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.client import Connection
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.server.warm import WarmSocket

_LOOK_S = 0.25
_TOLD_S = 3  # for those whose answers are cancelled to hear of it


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
    if (there := Connection.to(path)) is not None:
        there.__exit__()
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
    """What removes the socket that is at the path now. One that a later server has put there stays: the earlier one may
    still finish answers when it begins."""

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


class Serving:
    """idle_exit_s: end when nobody has asked for so long, 0 never. grace_s: what answers have to finish when it ends."""

    def __init__(
        self, app: Starlette, host: ServerState, warm: WarmSocket, *, grace_s: float, idle_exit_s: float
    ) -> None:
        self._host, self._warm, self._idle_exit_s = host, warm, idle_exit_s
        config = uvicorn.Config(
            app,
            log_level="warning",
            log_config=None,  # its own closes every handler there is: absl's takes stderr with it
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=round(grace_s) + _TOLD_S,
        )
        self._server = _Server(config, host, warm, grace_s)
        warm.on_stop = self._server.end

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Until it is told to end by a signal or over the warm socket. The sockets are closed then."""
        asyncio.run(self._run(sockets))

    async def _run(self, sockets: Sequence[socket.socket]) -> None:
        watch = asyncio.create_task(self._watch())
        await self._warm.start()
        try:
            await self._server.serve(sockets=list(sockets))
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while not self._idle_exit_s or self._host.idle_s < self._idle_exit_s:
            await asyncio.sleep(_LOOK_S)
        self._server.end()


class _Server(uvicorn.Server):
    """OutputProcessor at SIGINT and SIGTERM, and returns; a second SIGINT waits for no answer."""

    def __init__(self, config: uvicorn.Config, host: ServerState, warm: WarmSocket, grace_s: float) -> None:
        super().__init__(config)
        self._host, self._warm, self._grace_s = host, warm, grace_s

    def end(self) -> None:
        self._host.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Both ends at once take no more, and what they have is waited for together. What is cancelled then is told so."""
        warm = asyncio.create_task(self._warm.stop(self._grace_s))
        late = asyncio.get_running_loop().call_later(self._grace_s, self._host.service.cancel_all)
        await super().shutdown(sockets)
        late.cancel()
        while not (warm.done() or self.force_exit):
            await asyncio.wait([warm], timeout=_LOOK_S)
        warm.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but signals are not raised again at the end, where store and engine are still to be closed."""
        before: dict[int, Any] = {}
        with suppress(ValueError):  # in a thread of a test there are no signals
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
