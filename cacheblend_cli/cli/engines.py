"""Engines for commands: a running one, without loading a model or importing torch, or one in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.client import Client, EngineLost
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.corpus import places
from cacheblend_cli.corpus.scopes import project_scope
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.sockets import sockets_of
from cacheblend_cli.types import AnswerEvent, AskPlan, AskRequest, CompletedAnswer, Notes, Piece, Progress, SearchParams

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.corpus.search import SearchResult
    from cacheblend_cli.engine.engine import Request
    from cacheblend_cli.engine.events import Event


class WarmEngine:
    """A running engine and its store."""

    def __init__(self, client: Client, store: ChunkStore) -> None:
        self._client, self._store = client, store

    def events(self, ask: AskRequest) -> Iterator[AnswerEvent]:
        """Send the request, and return its events. Raises the engine's errors and EngineLost."""
        return self._local(self._client.events(self._with_project(ask)))

    def plan(self, ask: AskRequest) -> AskPlan:
        plan, names = self._client.plan(self._with_project(ask))
        chunks = [replace(chunk, source=places.shown(name)) for chunk, name in zip(plan.chunks, names, strict=True)]
        return replace(plan, chunks=chunks)

    def _with_project(self, ask: AskRequest) -> AskRequest:
        """Return the request with this process's project, which may differ from the engine's."""
        return replace(ask, cite_first=project_scope(self._store))

    def _local(self, events: Iterator[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Yield the events with document names relative to here and times from the start of this process."""
        first_at: float | None = None
        for event in events:
            if isinstance(event, Piece):
                first_at = first_at or time.perf_counter()
            if isinstance(event, CompletedAnswer):
                answer, names = event.answer, event.names
                chunks = [replace(c, source=places.shown(name)) for c, name in zip(answer.chunks, names, strict=True)]
                timing = replace(answer.timing, process_s=since_process_start(first_at), model_load_s=0.0)
                event = replace(event, answer=replace(answer, timing=timing, chunks=chunks))
            yield event


def search_warm(
    settings: Settings, query: str, params: SearchParams, note: Callable[[str], None]
) -> tuple[SearchResult, str] | None:
    """Search with any engine over this store. Return the result and a note naming the engine, None if none runs."""
    for path in sockets_of(settings):
        client = Client(path)
        if client.speaks_this_version:
            with suppress(EngineLost):
                found, notes, pid = client.search(query, params)
                for text in notes:
                    note(text)
                return found, f"by the engine of process {pid}"
    return None


class LocalEngine:
    """An engine in this process, for one question after another or many at once."""

    def __init__(self, resolved: Resolved, output: Output, store: ChunkStore) -> None:
        """Load the model. Raises UsageError, NotFoundError, DeviceError."""
        if resolved.settings.tier:
            from cacheblend_cli.cli.tier import share

            share(store, resolved.settings, output)
        settings = resolved.settings
        read_ahead(settings.model, settings.dtype, settings.weight_dtype)
        self._store, self.engine = store, options.load_engine(resolved.settings, output)
        self._note = cache(output.note)  # each message once, however many questions
        self.has_answered = False

    def events(self, ask: AskRequest) -> Iterator[AnswerEvent]:
        """Resolve the request, and return its events. After `serve` it is queued, otherwise computed as the events are
        read."""
        request = self.engine.resolve(self._store, ask, self._note)
        return self._told(request, self.engine.events(request))

    def _told(self, request: Request, events: Iterator[Event]) -> Iterator[AnswerEvent]:
        from cacheblend_cli.engine.events import Done

        yield Notes(list(request.notes))
        yield request.progress()
        for event in events:
            if isinstance(event, Progress) or (isinstance(event, Piece) and event.index == 0):
                yield event
            elif isinstance(event, Done):
                answer, self.has_answered = event.answers[0], True
                yield CompletedAnswer(answer, [], *self.engine.explain(request, answer))

    def plan(self, ask: AskRequest) -> AskPlan:
        return self.engine.plan_of(self.engine.resolve(self._store, ask, self._note))

    def serve(self, concurrency: int) -> None:
        """Run up to `concurrency` questions at once from now on."""
        from cacheblend_cli.engine.events import Limits

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency)
        self.engine.use(self._store, limits)
