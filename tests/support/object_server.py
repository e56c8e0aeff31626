"""An S3 server for tests: nanio in a thread, with faults on request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from nanio.app import build_app
from nanio.auth.credentials import StaticCredentialResolver
from nanio.config import Settings

KEY, SECRET = "test-access", "test-secret"


@dataclass
class ObjectServer:
    """A running object server. seen: (method, path, Range header) of each request."""

    data: Path  # folder of the buckets
    port: int = 0
    status: int = 0  # HTTP status for every request; 0: answer normally
    hang: float = 0.0  # delay of every request, seconds
    seen: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def objects(self) -> list[Path]:
        """The files of the chunks' objects."""
        return [p for p in self.data.glob("*/**/v1/**/*") if p.is_file() and "." not in p.name]


@contextmanager
def object_server(data: Path, bucket: str = "kv-test") -> Iterator[ObjectServer]:
    """Run an object server with one bucket for the duration of the block."""
    (data / bucket).mkdir(parents=True, exist_ok=True)
    server = ObjectServer(data)
    inner = build_app(Settings(data_dir=data, credentials=StaticCredentialResolver({KEY: SECRET}), access_log=False))
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            server.seen.append((scope["method"], scope["path"], headers.get("range", "")))
            until = time.monotonic() + server.hang
            while time.monotonic() < until and server.hang and not ended.is_set():
                await asyncio.sleep(0.01)
            if server.status:
                await send({"type": "http.response.start", "status": server.status, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await inner(scope, receive, send)

    running = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", loop="asyncio")
    )
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.005)
    server.port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        ended.set()
        running.should_exit = True
        thread.join(10)
