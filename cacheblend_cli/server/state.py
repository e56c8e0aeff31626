"""State of a server: engine, store, settings, API keys and metrics."""

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
from cacheblend_cli.server.errors import stopping
from cacheblend_cli.server.metrics import Metrics
from cacheblend_cli.server.tenants import Keyring
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import SamplingParams

if TYPE_CHECKING:
    from cacheblend_cli.server.remote_decoder import RemoteDecoder

T = TypeVar("T")
_PREPARING = 2  # threads; most of the work holds Python's lock


@dataclass
class ServerState:
    """Lives as long as the server. engine: uses the store; its model computes in the engine's thread alone. sampling:
    defaults of a request. names: host names that a browser may use, None for all. max_body: bytes of a request.
    draining: answers finish, new ones are refused. retrieve: a chat that brings no chunks is searched for in the store.
    find_passages: passages in messages become documents. any_model: a request that names another model is answered by
    this one. body_bytes: of all bodies in memory. ended: requests are to end now. pool: threads that prepare requests.
    decoder: a RemoteDecoder, None to decode here. converting: held while a file is converted, so that one of them stays
    for the others."""

    engine: Engine
    store: ChunkStore
    settings: Settings
    sampling: SamplingParams
    keyring: Keyring
    names: frozenset[str] | None = None
    max_body: int = 32 << 20
    retrieve: bool = False
    find_passages: bool = False
    any_model: bool = False
    metrics: Metrics = field(init=False)
    started: float = field(default_factory=time.time)
    draining: bool = False
    body_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    on_end: set[Callable[[], None]] = field(default_factory=set)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_PREPARING, "cacheblend-prepare"))
    converting: asyncio.Lock = field(default_factory=asyncio.Lock)
    decoder: RemoteDecoder | None = None
    _active: int = 0
    _preparing: int = 0
    _last_use: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine.stats, self.store.tier)

    @property
    def model(self) -> str:
        """Name of the model on the wire, without its path."""
        name = self.engine.model.name
        return PurePath(name).name or name

    def public(self, text: str) -> str:
        """A message without paths of this machine: the model is called by its name, the store "the store"."""
        for path, name in ((self.engine.model.name, self.model), (str(self.store.path), "the store")):
            if os.sep in path:  # "store" alone is a word, not a place
                text = text.replace(path, name)
        return text

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Result of work outside the event loop and the engine's thread: tokenising, cutting, embedding, searching,
        records. Raises ApiError when the server ends first."""
        return await self.unless_ended(asyncio.get_running_loop().run_in_executor(self.pool, work))

    async def in_engine(self, work: Callable[[], T]) -> T:
        """Result of work in the engine's thread: KV to compute. Raises ApiError when the server ends first."""
        return await self.unless_ended(asyncio.wrap_future(self.engine.between_steps(work)))

    async def unless_ended(self, result: asyncio.Future[T]) -> T:
        """The result. Raises ApiError when the server ends first; the result is cancelled then."""
        ended = asyncio.ensure_future(self.ended.wait())
        waited: list[asyncio.Future[Any]] = [result, ended]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise stopping()
            return result.result()
        finally:
            ended.cancel()
            result.cancel()

    @contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Context in which `count` requests are prepared. Raises QueueFull if the queue has no room for them."""
        self.engine.check_room(self._preparing + count - 1)
        self._preparing += count
        try:
            yield
        finally:
            self._preparing -= count

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is answered."""
        return 0.0 if self._active else time.monotonic() - self._last_use

    def end_requests(self) -> None:
        """End all requests in progress with an error, also those that wait for the engine."""
        self.ended.set()
        for end in list(self.on_end):
            end()

    @property
    def active(self) -> int:
        """Number of requests to /v1 in progress."""
        return self._active

    def __enter__(self) -> ServerState:
        """A request begins."""
        self._active += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        self._last_use = time.monotonic()


async def first_of(work: Awaitable[T], other: Coroutine[Any, Any, object]) -> T | None:
    """The work's result, None when the other was faster; the slower one is cancelled."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(other))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # passes on that this is cancelled meanwhile
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen: the slower one's is nobody's
