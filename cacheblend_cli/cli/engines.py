"""The engines that commands ask: a running one, without loading a model or importing torch, or one in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, End
from cacheblend_cli.cli.output import Output
from cacheblend_cli.client import Client, EngineLost, lost
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.corpus import places
from cacheblend_cli.corpus.scopes import project_scope
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.sockets import sockets_of
from cacheblend_cli.types import AnswerEvent, AskOptions, AskPlan, AskRequest, CompletedAnswer, Notes, SearchParams

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.corpus.search import SearchResult
    from cacheblend_cli.engine.engine import Request
    from cacheblend_cli.types import Answer


class WarmEngine:
    """A running engine and its store."""

    def __init__(self, client: Client, store: ChunkStore) -> None:
        self._client, self._store = client, store

    def begin(self, ask: AskRequest) -> End:
        """Send the request. Calling End streams the answer. Raises the engine's errors and EngineLost."""
        events = self._client.events(self._with_project(ask))
        return lambda streams: self._read(events, streams, ask.options)

    def plan(self, ask: AskRequest) -> AskPlan:
        plan, names = self._client.plan(self._with_project(ask))
        chunks = [replace(chunk, source=places.shown(name)) for chunk, name in zip(plan.chunks, names, strict=True)]
        return replace(plan, chunks=chunks)

    def _with_project(self, ask: AskRequest) -> AskRequest:
        """Return the request with this process's project, which may differ from the engine's."""
        return replace(ask, cite_first=project_scope(self._store))

    def _read(self, events: Iterator[AnswerEvent], streams: AnswerStream | None, options: AskOptions) -> AnswerResult:
        first_at: float | None = None
        shown: list[str] = []
        for event in events:
            if isinstance(event, CompletedAnswer):
                return self._result(event, first_at, options, shown)
            if isinstance(event, Notes):
                if streams is not None:
                    shown = event.notes
                    streams.notes(shown)
                continue
            first_at = first_at or time.perf_counter()
            if streams is not None:
                (streams.reasoning if event.reasoning else streams.text)(event.text)
        raise lost()

    def _result(
        self, completed: CompletedAnswer, first_at: float | None, options: AskOptions, shown: Sequence[str]
    ) -> AnswerResult:
        """Return the answer with document names relative to here and times from the start of this process."""
        answer = completed.answer
        process_s = since_process_start(first_at)
        chunks = [
            replace(chunk, source=places.shown(name))
            for chunk, name in zip(answer.chunks, completed.names, strict=True)
        ]
        timing = replace(answer.timing, process_s=process_s, model_load_s=0.0)
        answer = replace(answer, timing=timing, chunks=chunks)
        by = f", by the engine of process {completed.pid}"
        return AnswerResult(answer, options, completed.explained, completed.tokens, by, shown)


def search_warm(
    settings: Settings, query: str, params: SearchParams, note: Callable[[str], None]
) -> tuple[SearchResult, str] | None:
    """Search with any engine over this store. Return the result and a note of which engine, None if none runs."""
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
        read_ahead(resolved.settings)
        self._store, self._engine = store, options.load_engine(resolved.settings, output)
        self._serves = False
        self._note = cache(output.note)  # each message once, however many questions

    @property
    def model_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self._engine.model.files if file.exists())

    @property
    def is_lost(self) -> bool:
        """Return whether a rank has ended, so that it cannot answer any more."""
        return self._engine.is_lost

    def begin(self, ask: AskRequest) -> End:
        """Resolve the request. After `serve`, queue it; otherwise it runs when End is called."""
        from cacheblend_cli.engine.events import Event, Reasoning, Text

        request = self._engine.resolve(self._store, ask, self._note)
        if self._serves:
            answer = self._engine.queue(request)
            return lambda streams: self._result(request, answer.result())

        def end(streams: AnswerStream | None) -> AnswerResult:
            if streams is None:
                return self._result(request, self._engine.run(request))

            def on_event(event: Event) -> None:
                if isinstance(event, Text | Reasoning) and event.index == 0:
                    (streams.text if isinstance(event, Text) else streams.reasoning)(event.text)

            shown = tuple(request.notes)
            streams.notes(shown)
            return self._result(request, self._engine.run(request, on_event), shown)

        return end

    def plan(self, ask: AskRequest) -> AskPlan:
        return self._engine.plan(self._store, ask, self._note)

    def serve(self, concurrency: int) -> None:
        """Run up to `concurrency` questions at once from now on."""
        from cacheblend_cli.engine.events import Limits

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency)
        self._engine.serve(self._store, limits)
        self._serves = True

    def close(self) -> None:
        self._engine.close()

    def _result(self, request: Request, answer: Answer, shown: Sequence[str] = ()) -> AnswerResult:
        return AnswerResult(answer, request.options, *self._engine.explain(request, answer), shown=shown)
