"""The Model Context Protocol on stdin and stdout, by HTTP to an engine. Imports neither torch nor numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence

import anyio.to_thread
import httpx2

from cacheblend_cli.errors import UsageError
from cacheblend_cli.server import background
from cacheblend_cli.server.mcp_tools import Api, make_server
from cacheblend_cli.server.place import socket_of
from cacheblend_cli.settings import Settings

_TIMEOUT = httpx2.Timeout(None, connect=10.0)  # an answer may take minutes; clients cancel


def serve_url(url: str, key: str) -> None:
    """Serve until stdin ends, by the server at a URL, with or without /v1 at its end. key: its API key, "" for none."""
    if not re.match("https?://", url):
        raise UsageError(f"--url is {url!r}, not an address of HTTP", "such as http://127.0.0.1:8321")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    root = url.rstrip("/").removesuffix("/v1")
    make_server(Api(httpx2.AsyncClient(base_url=root, headers=headers, timeout=_TIMEOUT))).run("stdio")


def serve_store(settings: Settings, flags: Sequence[str], idle_exit_s: float) -> None:
    """Serve until stdin ends, by the engine of the settings. flags: those of `serve` that give these settings."""
    engine = StoreEngine(settings, flags, idle_exit_s)
    transport = httpx2.AsyncHTTPTransport(uds=str(socket_of(settings)))
    client = httpx2.AsyncClient(base_url="http://localhost", transport=transport, timeout=_TIMEOUT)
    make_server(Api(client, engine.ready), lists_documents=engine.listens).run("stdio")


class StoreEngine:
    """The engine behind the socket beside a store; it is started when it is first needed."""

    def __init__(self, settings: Settings, flags: Sequence[str], idle_exit_s: float) -> None:
        self._settings, self._flags, self._idle_exit_s = settings, flags, idle_exit_s
        self._starting = anyio.Lock()

    def listens(self) -> bool:
        """Return whether it runs, or loads its model: requests then wait for it."""
        return background.listens(self._settings)

    async def ready(self) -> None:
        """Start it unless it listens. Raises CacheBlendError with the engine's own message when it cannot start."""
        async with self._starting:
            if not self.listens():
                await anyio.to_thread.run_sync(self._start, abandon_on_cancel=True)

    def _start(self) -> None:
        background.start_own(self._settings, self._idle_exit_s, self._flags)
