"""Who answers: a running engine, or one in this process, which is loaded for the first question."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import Explained, Streams, Told
from cacheblend_cli.cli.inputs import Asked
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.warm import WarmEngine
from cacheblend_cli.inquiry import Inquiry, Manner
from cacheblend_cli.server.client import EngineLost
from cacheblend_cli.settings import Resolved

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Answer, AskPlan
    from cacheblend_cli.corpus.scopes import Scope
    from cacheblend_cli.runtime.jobs import Job
    from cacheblend_cli.runtime.service import Service


class LocalEngine:
    """In this process, for one question after the other or for many side by side."""

    def __init__(self, resolved: Resolved, manner: Manner, output: Output, store: ChunkStore) -> None:
        """Load it. What is wrong with the settings is said before. Raises UsageError, NotFoundError, DeviceError."""
        options.import_engine()
        from cacheblend_cli.runtime.config import BlendConfig
        from cacheblend_cli.runtime.sampling import sampling_of

        BlendConfig.of(resolved.settings)
        sampling_of(resolved, **manner.sampled)
        self._store, self._engine = store, options.load_engine(resolved.settings, output)
        self._service: Service | None = None
        self._say = cache(output.note)  # once, of however many questions

    def ask(self, inquiry: Inquiry, streams: Streams | None) -> Told:
        from cacheblend_cli.runtime.generate import Listener

        job = self._engine.job(self._store, inquiry, self._say)
        listener = Listener(streams.text, streams.reasoning) if streams else Listener()
        return self._told(inquiry, job, self._engine.ask(self._store, job.question, job, listener))

    def plan(self, inquiry: Inquiry) -> AskPlan:
        job = self._engine.job(self._store, inquiry, self._say)
        return self._engine.plan(self._store, job.question, auto=job.auto)

    def serve(self, concurrency: int) -> None:
        """Begin to answer so many questions side by side.

        What an answer is does not depend on those beside it: no KV that was blended for one question serves another.
        """
        from cacheblend_cli.runtime.service import Limits, Service

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency, hot_blended=False)
        self._service = Service(self._engine.runtime, self._store, limits)

    def begin(self, inquiry: Inquiry) -> Callable[[Streams | None], Told]:
        """Have it asked beside others; what is given waits for its answer."""
        from cacheblend_cli.runtime.service import Done, Failed

        assert self._service is not None
        job = self._service.run(lambda runtime: self._engine.job(self._store, inquiry, self._say)).result()
        answered: Future[Any] = Future()

        def heard(event: object) -> None:
            if isinstance(event, Done):
                answered.set_result(event.answers[0])
            elif isinstance(event, Failed):
                answered.set_exception(event.error)

        self._service.submit(job, heard)
        return lambda streams: self._told(inquiry, job, answered.result())

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def _told(self, inquiry: Inquiry, job: Job, answer: Answer) -> Told:
        return Told(answer, Explained(*self._engine.told(self._store, job.question, answer, inquiry.manner)))


@dataclass(frozen=True)
class Answered:
    """A question of several, and what came of it: an answer, a plan, or an error."""

    asked: Asked
    told: Told | None = None
    plan: AskPlan | None = None
    error: Exception | None = None


class Answering:
    """Over a store that stays open meanwhile. scope: of what is searched, None for all of it. A running engine is looked for, unless `local`, as
    long as none was loaded here."""

    def __init__(self, resolved: Resolved, manner: Manner, output: Output, store: ChunkStore, *, local: bool) -> None:
        self._resolved, self._manner, self._output, self._local = resolved, manner, output, local
        self.store = store
        self.scope: Scope | None = None
        self._here: LocalEngine | None = None

    def ask(self, asked: Asked, streams: Streams | None = None, history: Sequence[str] = ()) -> Told:
        """Raises what `ask` fails of, and EngineLost where a running engine ended in the middle of the answer."""
        inquiry = self._inquiry(asked, history)
        if (warm := self._warm()) is not None:
            try:
                return warm.begin(inquiry)(streams)
            except EngineLost:
                if streams is not None and streams.begun:
                    raise
        return self._loaded().ask(inquiry, streams)

    def plan(self, asked: Asked) -> AskPlan:
        inquiry, warm = self._inquiry(asked), self._warm()
        return (self._loaded() if warm is None else warm).plan(inquiry)

    def plans(self, asked: Sequence[Asked]) -> Iterator[Answered]:
        for item in asked:
            try:
                yield Answered(item, plan=self.plan(item))
            except Exception as error:
                yield Answered(item, error=error)

    def answers(self, asked: Sequence[Asked], concurrency: int) -> Iterator[Answered]:
        """So many at a time, in order, as soon as all before them are there. What a running engine leaves when it ends is
        answered here."""
        left = deque(asked)
        if (warm := self._warm()) is not None:
            try:
                for answered in _in_order(asked, lambda item: warm.begin(self._inquiry(item)), concurrency):
                    left.popleft()
                    yield answered
                return
            except EngineLost as error:
                self._output.note(f"{error.message}; the questions that are left are answered here")
        if not left:
            return
        here = self._loaded()
        here.serve(concurrency)
        # twice as many are known, so that the next one's KV loads meanwhile
        yield from _in_order(left, lambda item: here.begin(self._inquiry(item)), 2 * concurrency)

    def documents(self) -> list[str]:
        """The documents that are searched, as a person standing here calls them."""
        from cacheblend_cli.corpus.places import shown
        from cacheblend_cli.corpus.scopes import EVERYTHING
        from cacheblend_cli.corpus.search import searchable

        scope = self.scope or EVERYTHING
        return [shown(name) for name in searchable(self.store) if scope.holds(name)]

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._here is not None:
            self._here.close()

    def _warm(self) -> WarmEngine | None:
        return None if self._local or self._here else WarmEngine.of(self._resolved.settings, self.store)

    def _loaded(self) -> LocalEngine:
        if self._here is None:
            self._here = LocalEngine(self._resolved, self._manner, self._output, self.store)
        return self._here

    def _inquiry(self, asked: Asked, history: Sequence[str] = ()) -> Inquiry:
        """Raises ChunkNotFound, AmbiguousId."""
        keys = None if asked.chunks is None else tuple(self.store.resolve(name).hex() for name in asked.chunks)
        return Inquiry(asked.question, keys, self._resolved, self.scope, tuple(history), self._manner)


Begin = Callable[[Asked], Callable[[Streams | None], Told]]


def _in_order(asked: Sequence[Asked], begin: Begin, most: int) -> Iterator[Answered]:
    """Up to `most` have begun and are not told yet."""
    running: deque[tuple[Asked, Callable[[Streams | None], Told] | Exception]] = deque()

    def answered() -> Answered:
        item, end = running.popleft()
        try:
            if isinstance(end, Exception):
                raise end
            return Answered(item, end(None))
        except EngineLost:
            raise
        except Exception as error:
            return Answered(item, error=error)

    for item in asked:
        try:
            running.append((item, begin(item)))
        except Exception as error:
            running.append((item, error))
        while len(running) >= most or (running and isinstance(running[0][1], Exception)):
            yield answered()
    while running:
        yield answered()
