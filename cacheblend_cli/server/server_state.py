"""Shared state of the server: engine, store, settings, API keys and metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from cacheblend_store import ChunkStore

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server.api_errors import server_stopping
from cacheblend_cli.server.metrics import Metrics
from cacheblend_cli.server.tenants import Keyring
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import SamplingParams

if TYPE_CHECKING:
    from cacheblend_cli.server.remote_decoder import RemoteDecoder

T = TypeVar("T")
_PREPARING = 2  # threads; most of the work holds the GIL


@dataclass
class ServerState:
    """State that all routes share for the server's lifetime."""

    engine: Engine  # computes in its own thread
    store: ChunkStore
    settings: Settings
    sampling: SamplingParams  # defaults of requests
    keyring: Keyring
    names: frozenset[str] | None = None  # host names that browsers may use, None for all
    max_body: int = 32 << 20  # bytes
    retrieve: bool = False  # search the store for chats without chunks
    find_passages: bool = False  # treat tagged passages in messages as documents
    any_model: bool = False  # accept requests that name another model
    metrics: Metrics = field(init=False)
    started: float = field(default_factory=time.time)
    draining: bool = False  # running answers finish, new requests are refused
    body_bytes: int = 0  # request bodies in memory
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # all requests must end now
    on_end: set[Callable[[], None]] = field(default_factory=set)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_PREPARING, "cacheblend-prepare"))
    # one conversion at a time, so that a thread stays free
    converting: asyncio.Lock = field(default_factory=asyncio.Lock)
    decoder: RemoteDecoder | None = None  # None to decode here
    active: int = 0  # requests to /v1, /api and /mcp in progress
    _preparing: int = 0
    _last_use: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine.stats, self.store.tier)

    @property
    def model(self) -> str:
        """The model's public name, without its path."""
        name = self.engine.model.name
        return PurePath(name).name or name

    def public(self, text: str) -> str:
        """Return a message with the paths of model and store replaced by their names."""
        for path, name in ((self.engine.model.name, self.model), (str(self.store.path), "the store")):
            if os.sep in path:  # do not replace the plain word "store"
                text = text.replace(path, name)
        return text

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run work in the pool, outside event loop and engine: tokenising, chunking, embedding, searching.

        Raises ApiError if the server stops first.
        """
        return await self.unless_ended(asyncio.get_running_loop().run_in_executor(self.pool, work))

    async def in_engine(self, work: Callable[[], T]) -> T:
        """Run work in the engine's thread. Raises ApiError if the server stops first."""
        return await self.unless_ended(asyncio.wrap_future(self.engine.between_steps(work)))

    async def unless_ended(self, result: asyncio.Future[T]) -> T:
        """Return the result. If the server stops first, cancels the future and raises ApiError."""
        await first_of(result, self.ended.wait())
        if result.cancelled():
            raise server_stopping()
        return result.result()

    @contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Reserve room in the queue while `count` requests are prepared. Raises QueueFull."""
        self.engine.check_room(self._preparing + count - 1)
        self._preparing += count
        try:
            yield
        finally:
            self._preparing -= count

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is in progress."""
        return 0.0 if self.active else time.monotonic() - self._last_use

    def end_requests(self) -> None:
        """End all requests with an error, also those waiting for the engine."""
        self.ended.set()
        for end in list(self.on_end):
            end()

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count a request as active."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self._last_use = time.monotonic()


async def first_of(work: Awaitable[T], other: Coroutine[Any, Any, object]) -> T | None:
    """Return the work's result, or None if `other` ended first. Cancels the slower one."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(other))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # propagates a cancellation
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark as retrieved
