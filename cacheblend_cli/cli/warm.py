"""Questions for a running engine: the same answers, the same output, no model loaded. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cacheblend_cli.cli.answers import End, Result, Streams
from cacheblend_cli.client import Client, CompletedAnswer, EngineLost, Notes, Piece, lost
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.corpus import places
from cacheblend_cli.corpus.scopes import project_scope
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import sockets_of
from cacheblend_cli.types import AskOptions, AskPlan, AskRequest, SearchParams

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.corpus.search import Found


class WarmEngine:
    """A running engine, and the store that its chunks are in."""

    def __init__(self, client: Client, store: ChunkStore) -> None:
        self._client, self._store = client, store

    def begin(self, ask: AskRequest) -> End:
        """Send the request. Its pieces are streamed while its end is waited for. Raises the engine's errors,
        EngineLost."""
        events = self._client.events(self._from_here(ask))
        return lambda streams: self._read(events, streams, ask.options)

    def plan(self, ask: AskRequest) -> AskPlan:
        plan, names = self._client.plan(self._from_here(ask))
        chunks = [{**chunk, "source": places.shown(name)} for chunk, name in zip(plan.chunks, names, strict=True)]
        return replace(plan, chunks=chunks)

    def _from_here(self, ask: AskRequest) -> AskRequest:
        """Return the request of this process, whose project may be another than the engine's."""
        return replace(ask, cite_first=project_scope(self._store))

    def _read(
        self, events: Iterator[Notes | Piece | CompletedAnswer], streams: Streams | None, options: AskOptions
    ) -> Result:
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
    ) -> Result:
        """Documents are named as seen from here; times count from the start of this process."""
        answer = completed.answer
        process_s = since_process_start(first_at or time.perf_counter())
        chunks = [
            replace(chunk, source=places.shown(name))
            for chunk, name in zip(answer.chunks, completed.names, strict=True)
        ]
        timing = replace(answer.timing, process_s=process_s, model_load_s=0.0)
        answer = replace(answer, timing=timing, chunks=chunks)
        by = f", by the engine of process {completed.pid}"
        return Result(answer, options, completed.explained, completed.tokens, by, shown)


def search_warm(
    settings: Settings, query: str, params: SearchParams, say: Callable[[str], None]
) -> tuple[Found, str] | None:
    """Return what an engine over this store finds, of whatever model, and a note of which it is; None if none runs."""
    for path in sockets_of(settings):
        client = Client(path)
        if client.speaks_this_version:
            with suppress(EngineLost):
                found, notes, pid = client.search(query, params)
                for note in notes:
                    say(note)
                return found, f"by the engine of process {pid}"
    return None
