"""Base of an engine: its model, its thread (started by the first request), and the store of its requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Self

from cacheblend_store import ChunkStore

from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.core.core import ALONE, EngineCore, admit
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.request.model_sampling import as_the_model
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime, load_worker_model
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.settings import DEFAULTS, Resolved, Settings
from cacheblend_cli.types import Answer, SamplingParams


class EngineThread:
    """Base of Engine: describes its model, queues requests, and starts its thread with the first one."""

    def __init__(self, runtime: Runtime, resolved: Resolved = DEFAULTS, limits: Limits | None = None) -> None:
        """resolved: settings of requests, and for cutting their documents. limits: of batched requests."""
        self.runtime, self._resolved, self._limits = runtime, resolved, limits
        self.model, self.config, self.context = runtime.model, runtime.config, runtime.context
        self.prompts: Prompts = runtime
        self.template = runtime.template  # of prompts in the engine's own wording
        self._service: AsyncEngine | None = None
        self._closed: AsyncEngine | None = None  # the last one: refuses requests, keeps its statistics
        self._given: ChunkStore | None = None
        self._store: ChunkStore | None = None
        self._temporary = ExitStack()
        self._folder: TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()  # guards these six

    @property
    def is_parallel(self) -> bool:
        """Return whether the model is split over several processes."""
        return not self.runtime.decoder.part.is_whole

    @property
    def is_lost(self) -> bool:
        """Return whether another rank has ended, so that no request can be answered."""
        return self.runtime.driver.is_lost

    def when_lost(self, act: Callable[[CacheBlendError], Any]) -> None:
        """Call `act`, from any thread, when another rank is lost: waiting for that rank may never end."""
        self.runtime.driver.when_lost(act)

    def describe(self) -> dict[str, Any]:
        """Return facts for `doctor`."""
        return self.runtime.describe()

    def worker_loader(self, threads: int) -> Callable[[], LoadedModel]:
        """Return a picklable function that loads the same model on another machine."""
        return partial(load_worker_model, self.runtime.worker_config(threads))

    def sampling_of_model(self, sampling: SamplingParams, fields: Collection[str]) -> SamplingParams:
        """Return the sampling with these fields from generation_config.json, if it has them. Raises UsageError."""
        return as_the_model(sampling, fields, self.model)

    def reserve_memory(self) -> None:
        """Take a GPU's KV pool and decode graphs now, not with the first request. Raises DeviceError."""
        self.runtime.memory()

    # its thread and store

    def use(self, store: ChunkStore | None, limits: Limits | None = None) -> None:
        """Use this store from now on, also for the KV of requests' documents and for `add`. None: a temporary store,
        which `close` removes. limits: None for those before. No request may be running."""
        with self._lock:
            self._limits = limits or self._limits
            if self._service is None or store is not self._given:
                if self._service is not None:
                    self.close()
                self._given, self._store = store, self._temporary_store() if store is None else store
                _share(self._store, self._resolved.settings)
                self._service, self._closed = AsyncEngine(self.runtime, self._limits, FEATURES), None

    def events(self, request: Request) -> Generator[Event]:
        """Return the events of a resolved request, Done last. Raises the error of a failed one.

        If the engine's thread runs, the request is queued now, and closing the iterator cancels it. Otherwise it is
        computed while the events are read, in this thread and a pool of the needed size. Missing chunks (without usable
        KV) are stored after the answer if the store is writable. Used chunks are marked as such (`ChunkStore.touch`).
        Raises UsageError, DeviceError, StoreErrors, QueueFull.
        """
        if self._service is None:
            return self._alone(request)
        events = queue.SimpleQueue[Event]()
        service = self.service
        state = service.submit(request, events.put)

        def queued() -> Generator[Event]:
            try:
                yield from _until_done(iter(events.get, None))
            finally:
                service.cancel(state)

        return queued()

    def _alone(self, request: Request) -> Generator[Event]:
        """Yield the events of a request that is computed in this thread."""
        state, runtime = RequestState(request, 0), self.runtime
        admit(runtime, state, FEATURES)
        size, headroom = runtime.config.block_size, state.max_new_tokens
        each = -(-(headroom + size) // size) + 1  # blocks of each further answer
        memory = runtime.memory_for(-(-(state.num_tokens + headroom) // size) + 1 + (state.num_answers - 1) * each)
        memory.pool.check_fits(state.num_tokens + headroom)
        core = EngineCore(runtime, ALONE, memory, FEATURES)
        core.add(state)
        try:
            while core.busy:
                yield from _until_done(event for _, event in core.step())
        finally:
            core.close()

    def close(self) -> None:
        """Stop the engine's thread and remove its temporary store. Running requests are cancelled."""
        with self._lock:
            if self._service is not None:
                self._service.close()
                self._service, self._closed = None, self._service
            self._temporary.close()
            self.runtime.driver.drop()

    def remove_files(self) -> None:
        """Remove the temporary store's files, even if in use, in a process that ends without `close`."""
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _temporary_store(self) -> ChunkStore:
        self._folder = TemporaryDirectory(prefix="cacheblend-")
        folder = self._temporary.enter_context(self._folder)
        return self._temporary.enter_context(ChunkStore.open(folder, mode="write", force=True))  # wherever TMPDIR is

    def _started(self) -> AsyncEngine:
        """Return the engine core's thread; start it if it does not run."""
        with self._lock:
            if self._service is None:
                self.use(self._given)
            assert self._service is not None
            return self._service

    @property
    def service(self) -> AsyncEngine:
        """The engine core's thread; after `close`, the closed one, which refuses requests."""
        with self._lock:
            return self._service or self._closed or self._started()


def _until_done(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events up to Done. Raises the error of a failed request."""
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        yield event
        if isinstance(event, Done):
            return


def first_answer(events: Iterable[Event]) -> Answer:
    """Return the first answer of a request, once it is done."""
    *_, last = events
    assert isinstance(last, Done)
    return last.answers[0]


def _share(store: ChunkStore, settings: Settings) -> None:
    """Attach the tier of the settings, if any, to a store without one. Raises TierUsage, TierNotFound."""
    if settings.tier and store.tier is None:
        from cacheblend_store.tier import SharedTier

        from cacheblend_cli.kv.tier_location import open_tier

        tier = SharedTier(open_tier(settings.tier, settings.tier_key_file or None), settings.tier_deadline)
        tier.check_later()
        store.share(tier)
