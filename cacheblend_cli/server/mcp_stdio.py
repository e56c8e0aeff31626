"""Model Context Protocol on stdin and stdout, by HTTP to an engine. Imports neither torch nor numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import anyio.to_thread
import httpx2

from cacheblend_cli.errors import UsageError
from cacheblend_cli.server import background
from cacheblend_cli.server.mcp_tools import Api, make_server
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import socket_of

_TIMEOUT = httpx2.Timeout(None, connect=10.0)  # an answer may take minutes; clients cancel


def serve_url(url: str, key: str) -> None:
    """Serve until stdin ends, using the server at a URL with or without /v1. key: its API key, "" for none."""
    if not re.match("https?://", url):
        raise UsageError(f"--url {url!r} is not an HTTP URL", "for example http://127.0.0.1:8321")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    root = url.rstrip("/").removesuffix("/v1")
    make_server(Api(httpx2.AsyncClient(base_url=root, headers=headers, timeout=_TIMEOUT))).run("stdio")


def serve_store(settings: Settings, flags: Sequence[str], idle_exit_s: float) -> None:
    """Serve until stdin ends, using the engine with these settings. flags: flags of `serve` for these settings."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket_of(settings)))
    client = httpx2.AsyncClient(base_url="http://localhost", transport=transport, timeout=_TIMEOUT)
    start_lock, listens = anyio.Lock(), partial(background.listens, settings)

    async def ready() -> None:
        """Start the engine unless it is running or loading. Raises CacheBlendError with the engine's message."""
        async with start_lock:
            if not listens():
                start = partial(background.start_own, settings, idle_exit_s, flags)
                await anyio.to_thread.run_sync(start, abandon_on_cancel=True)

    make_server(Api(client, ready), lists_documents=listens).run("stdio")
