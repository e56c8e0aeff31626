"""Shared state of the server: engine, store, settings, API keys and metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from cacheblend_store import ChunkStore

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server.api_errors import server_stopping
from cacheblend_cli.server.fair_pool import FairPool
from cacheblend_cli.server.metrics import Metrics
from cacheblend_cli.server.tenants import Keyring, Tenant
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import SamplingParams

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from cacheblend_cli.engine.engine import Request as EngineRequest
    from cacheblend_cli.engine.events import Done, Event

T = TypeVar("T")
_FOUND = 256
LIGHT_CHARACTERS = 64 << 10
"""Maximum characters of texts that the light threads tokenise or cut in one piece of work: some .1 s."""


@dataclass(frozen=True)
class Pools:
    """Threads beside the event loop and the engine's thread. In each, tenants take turns."""

    # searches, lists, short texts: two, because most of the work holds the GIL
    light: FairPool = field(default_factory=lambda: FairPool("cacheblend-light", 2))
    # files and long texts
    heavy: FairPool = field(default_factory=lambda: FairPool("cacheblend-heavy", 2, most_per_tenant=1))
    # changes of the store, which wait for its writer lock
    writing: FairPool = field(default_factory=lambda: FairPool("cacheblend-writing", 1))

    def for_text(self, num_characters: int) -> FairPool:
        """Return the threads that tokenise or cut texts of this length in total."""
        return self.light if num_characters <= LIGHT_CHARACTERS else self.heavy

    def close(self, wait_s: float) -> None:
        """Take no more work, drop what is queued and wait at most wait_s for each pool."""
        for pool in (self.light, self.heavy, self.writing):
            pool.close(wait_s)


class AnswerEvents(Protocol):
    """Events of a submitted request, as of server/request_events.py: RequestEvents."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def events(self) -> AsyncIterator[Event]: ...
    async def done(self) -> Done: ...


class Decoder(Protocol):
    """Decodes prompts that this server prefills: of another distribution, for --decoder NAME:ADDRESS."""

    routes: Mapping[str, Callable[[Request, ServerState], Awaitable[Response]]]
    """Handler by "METHOD /path"; they need no API key."""

    def events(self, state: ServerState, request: EngineRequest) -> AnswerEvents | None:
        """Submit a request and return its events; None for a request to decode here. Raises QueueFull, UsageError."""
        ...


@dataclass
class ServerState:
    """State that all routes share for the server's lifetime."""

    engine: Engine  # computes in its own thread
    store: ChunkStore
    settings: Settings
    sampling: SamplingParams  # defaults of requests
    keyring: Keyring
    names: frozenset[str] | None = None  # host names that browsers may use, None for all
    origins: frozenset[str] = frozenset()  # of browser clients on other sites, see auth.py
    max_body: int = 32 << 20  # bytes
    find_passages: bool = False  # treat tagged passages in messages as documents
    any_model: bool = False  # accept requests that name another model
    metrics: Metrics = field(init=False)
    started: float = field(default_factory=time.time)
    draining: bool = False  # running answers finish, new requests are refused
    body_bytes: int = 0  # request bodies in memory
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # all requests must end now
    on_end: set[Callable[[], None]] = field(default_factory=set)
    pools: Pools = field(default_factory=Pools)
    # by tenant: one large upload at a time
    large_uploads: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    decoder: Decoder | None = None  # None to decode here
    active: int = 0  # requests to /v1, /api and /mcp in progress
    found: deque[bytes] = field(default_factory=lambda: deque(maxlen=_FOUND))  # chunks of the latest searches
    finishing: bool = False  # missing KV is computed on request: no idle exit
    _preparing: int = 0
    _last_use: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.engine.service.stats(), self.store.tier)

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

    async def in_pool(
        self,
        tenant: Tenant,
        work: Callable[[], T],
        pool: FairPool | None = None,
        cancellation: Cancellation | None = None,
    ) -> T:
        """Run work of a tenant in a pool, by default the light threads.

        If this task is cancelled (the client has left) or the server stops, queued work is dropped and running work
        cancelled. A cancelled task waits for its running work, so that the request counts while its texts are in
        memory. Raises ApiError if the server stops first.
        """
        future = (pool or self.pools.light).submit(tenant.name, work)
        try:
            return await self.unless_ended(asyncio.wrap_future(future))
        finally:
            if not future.done():  # it runs
                if cancellation is not None:
                    cancellation.cancel()
                with suppress(Exception):  # nobody wants its result
                    await first_of(asyncio.wrap_future(future), self.ended.wait())

    async def write(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """Change the store in the writing thread. Waits for running work even if the server stops, so that nothing
        contradicts it meanwhile."""
        future = self.pools.writing.submit(tenant.name, work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if not future.done():
                with suppress(Exception):
                    await asyncio.wrap_future(future)

    async def in_engine(self, work: Callable[[], T]) -> T:
        """Run work in the engine's thread. Raises ApiError if the server stops first."""
        return await self.unless_ended(asyncio.wrap_future(self.engine.service.between_steps(work)))

    async def unless_ended(self, result: asyncio.Future[T]) -> T:
        """Return the result. If the server stops first, cancels the future and raises ApiError."""
        await first_of(result, self.ended.wait())
        if result.cancelled():
            raise server_stopping()
        return result.result()

    @contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Reserve room in the queue while `count` requests are prepared. Raises QueueFull."""
        self.engine.service.check_room(self._preparing + count - 1)
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
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self.used()

    def used(self) -> None:
        """Begin to count idle time."""
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
