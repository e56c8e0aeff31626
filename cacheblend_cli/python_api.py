"""What Python programs import: a model that is loaded once and asked by any number of threads."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore

from cacheblend_cli import api
from cacheblend_cli.corpus.search import Lookup
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.config import BlendConfig, EngineConfig
from cacheblend_cli.engine.jobs import Done, Event, Failed, Job, Limits, Text
from cacheblend_cli.engine.request import Question, resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import as_the_model, sampling_of
from cacheblend_cli.engine.search import with_chunks
from cacheblend_cli.engine.sequence import RequestState
from cacheblend_cli.errors import QueueFull, UsageError
from cacheblend_cli.server import documents as documents_of
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.settings import DEFAULTS, Resolved, of_settings
from cacheblend_cli.types import Answer

if TYPE_CHECKING:
    from cacheblend_cli.engine.connectors.transformers import PrefilledPrompt

__all__ = ["Added", "Asked", "Engine"]


@dataclass(frozen=True)
class Added:
    """A document in the store: its id, and the ids of its chunks in order."""

    id: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A question. documents: texts it is over, cut and collected when they are first seen. chunks: ids of stored chunks.
    search: how many more to search for. history: what was said before, by the user and the model in turn. settings: over the
    engine's, as ratio=0.3 or max_tokens=20."""

    question: str
    documents: Sequence[str] = ()
    chunks: Sequence[str] = ()
    search: int = 0
    history: Sequence[str] = ()
    verify: bool = False
    settings: dict[str, Any] | None = None


class Engine:
    """A loaded model. Its methods may be called from any thread; questions that are asked together are answered together.

    Use as a context manager, or close it: a thread of its own runs the model.
    """

    def __init__(self, loaded: api.Engine, resolved: Resolved, limits: Limits | None = None) -> None:
        self._loaded, self._resolved, self._limits = loaded, resolved, limits
        self._service: AsyncEngine | None = None
        self._given: ChunkStore | None = None
        self._store: ChunkStore | None = None
        self._temporary = ExitStack()
        self._lock = threading.RLock()  # guards all of these

    @classmethod
    def load(cls, model: str | None = None, **settings: Any) -> Engine:
        """Load a model: a directory, a .gguf file, a hub id, "smollm2" or "handbook". settings: as `cacheblend config show`
        names them (device, dtype, threads, ratio, max_tokens, ...); files and variables are not read.

        Raises NotFoundError, UsageError or DeviceError.
        """
        resolved = _with(DEFAULTS, {"model": model or "", **settings})
        made = resolved.settings
        config = of_settings(EngineConfig, made, model=made.model or None, lora=made.lora or None)
        return cls(api.Engine.load(config), resolved)

    @property
    def model(self) -> str:
        return self._loaded.model.name

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's thread and remove its temporary store. Running answers are cancelled."""
        with self._lock:
            if self._service is not None:
                self._service.close()
                self._service = None
            self._temporary.close()

    def use(self, store: ChunkStore | None) -> None:
        """Take chunks from this store from now on, and keep the KV of questions' documents there; `add` does so, too. None:
        a temporary store, which `close` removes. No question may be running."""
        with self._lock:
            if self._service is None or store is not self._given:
                self.close()
                self._given, self._store = store, self._temporary_store() if store is None else store
                self._service = AsyncEngine(self._loaded.runtime, self._store, self._limits)

    def _temporary_store(self) -> ChunkStore:
        folder = self._temporary.enter_context(TemporaryDirectory(prefix="cacheblend-"))
        return self._temporary.enter_context(ChunkStore.open(folder, mode="write"))

    def add(self, store: ChunkStore, texts: Iterable[tuple[str, str]]) -> list[Added]:
        """Store documents, (id, text) each, in place of what was stored under the same ids; their KV is computed now.

        Raises UsageError for an empty text, and StoreErrors.
        """
        self.use(store)
        added, settings = [], self._resolved.settings
        for document_id, text in texts:
            document = documents_of.document_of(documents_of.put_name(_OWN, document_id), text, None)
            putting = documents_of.Putting(self._loaded.runtime, store, document, settings, settings.salt)
            try:
                while self._run().run(putting.collect).result():
                    pass
                putting.commit()
            except Exception:
                putting.undo()
                raise
            added.append(Added(document_id, tuple(planned.key.hex() for planned in putting.chunks)))
        return added

    def ask(self, question: str | Asked, **about: Any) -> Answer:
        """The answer to a question. about: fields of Asked, and settings over the engine's.

        Raises NotFoundError, UsageError, StoreErrors and DeviceError.
        """
        return self._submit(_asked(question, about)).result()

    def prefill(self, question: str | Asked, **about: Any) -> PrefilledPrompt:
        """Prefill a question's prompt for transformers' `generate`, and keep no answer. Arguments and errors as for `ask`."""
        from cacheblend_cli.engine.connectors.transformers import PrefilledPrompt, TransformersConnector

        taken = TransformersConnector()
        job = replace(self._job(_asked(question, {**about, "max_tokens": 1})), connector=taken)
        report = self._run().ask(job).result()
        return PrefilledPrompt(tuple(report.prompt_ids), taken.layers, report, self._loaded.model.path)

    def stream(self, question: str | Asked, **about: Any) -> Iterator[str]:
        """Yield pieces of the answer as they are generated. Leaving the loop early cancels the answer."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        service = self._run()
        state = service.submit(self._job(_asked(question, about)), events.put)
        try:
            while not isinstance(event := events.get(), Done):
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Text):
                    yield event.text
        finally:
            service.cancel(state)

    def ask_many(self, questions: Iterable[str | Asked], **about: Any) -> list[Answer]:
        """Return the answers in order. The questions are answered side by side, however many there are: as many are queued as
        the engine takes. Raises the error of the first that fails, and cancels the others."""
        answers, running = list[Answer](), deque[Future[Answer]]()
        try:
            for question in questions:
                asked = _asked(question, about)
                while (submitted := self._submit_unless_full(asked, wait=not running)) is None:
                    answers.append(running.popleft().result())
                running.append(submitted)
            while running:
                answers.append(running.popleft().result())
        finally:
            for future in running:
                future.cancel()
        return answers

    async def ask_async(self, question: str | Asked, **about: Any) -> Answer:
        """Answer without blocking the event loop. Cancelling the task cancels the answer."""
        asked, left = _asked(question, about), threading.Event()

        def submit() -> Future[Answer]:
            future = self._submit(asked)
            if left.is_set():
                future.cancel()
            return future

        try:
            return await asyncio.wrap_future(await asyncio.to_thread(submit))
        finally:
            left.set()

    async def stream_async(self, question: str | Asked, **about: Any) -> AsyncIterator[str]:
        """Stream without blocking the event loop. Leaving the loop, or cancelling the task, cancels the answer."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        asked, left = _asked(question, about), threading.Event()
        service, states = await asyncio.to_thread(self._run), list[RequestState]()

        def on_event(event: Event) -> None:
            if not left.is_set():
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            states.append(service.submit(self._job(asked), on_event))
            if left.is_set():
                service.cancel(states[0])

        try:
            await asyncio.to_thread(submit)
            while not isinstance(event := await events.get(), Done):
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Text):
                    yield event.text
        finally:
            left.set()
            for state in states:
                service.cancel(state)

    def _run(self) -> AsyncEngine:
        with self._lock:
            if self._service is None:
                self.use(self._given)
            assert self._service is not None
            return self._service

    def _submit(self, asked: Asked) -> Future[Answer]:
        return self._run().ask(self._job(asked))

    def _submit_unless_full(self, asked: Asked, *, wait: bool) -> Future[Answer] | None:
        """Queue the question. With a full queue return None, or with `wait` try again until it has room."""
        while True:
            try:
                return self._submit(asked)
            except QueueFull:
                if not wait:
                    return None
                time.sleep(_FULL_S)

    def _job(self, asked: Asked) -> Job:
        resolved = _with(self._resolved, asked.settings or {})
        self._run()
        assert self._store is not None, "it is opened with the service"
        return _job_of(self._loaded.runtime, self._store, resolved, asked)


_OWN = Tenant("", "")
_FULL_S = 0.05  # between two looks at a queue that others have filled


def _job_of(runtime: Runtime, store: ChunkStore, resolved: Resolved, asked: Asked) -> Job:
    """The job of a question, its prompt laid out: documents first, then named chunks, then those that are found."""
    settings, sampling = resolved.settings, as_the_model(sampling_of(resolved), resolved, runtime.model)
    question = Question(
        asked.question, (), BlendConfig.of(settings), sampling, settings.salt, history=tuple(asked.history)
    )
    keys: list[bytes] = []
    if asked.documents or asked.chunks or asked.search:
        question = question.dated(runtime, store)
        given = [documents_of.sent(text, None, _OWN) for text in asked.documents]
        collection = runtime.collection(settings.salt, day=question.day)
        planned = [chunk for _, own in documents_of.plan(collection, given, settings) for chunk in own]
        question = replace(question, given=tuple(planned))
        keys = [chunk.key for chunk in planned] + [store.resolve(name) for name in asked.chunks]
        if asked.search:
            lookup = Lookup.of(replace(settings, top_k=asked.search))
            found = with_chunks(runtime, store, question, lookup, keys)
            keys, question = keys + list(found.keys), replace(question, notes=found.notes)
    auto = settings.ratio == "auto"
    question = replace(question, keys=list(dict.fromkeys(keys)))
    return Job(question, verify=asked.verify, auto=auto, request=resolve(runtime, store, question))


def _asked(question: str | Asked, about: dict[str, Any]) -> Asked:
    """about: fields of Asked by their names; what is none of them is a setting."""
    fields = {name: about[name] for name in about.keys() & Asked.__dataclass_fields__.keys()}
    settings = {name: value for name, value in about.items() if name not in fields}
    asked = replace(question, **fields) if isinstance(question, Asked) else Asked(question, **fields)
    return replace(asked, settings={**(asked.settings or {}), **settings})


def _with(resolved: Resolved, given: dict[str, Any]) -> Resolved:
    """Raises UsageError for a setting there is none of."""
    if unknown := given.keys() - resolved.origin.keys():
        raise UsageError(f"unknown setting {min(unknown)!r}", f"known: {', '.join(resolved.origin)}")
    return Resolved(replace(resolved.settings, **given), {**resolved.origin, **dict.fromkeys(given, "given")})
