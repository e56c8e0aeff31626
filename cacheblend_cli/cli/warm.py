"""An engine that runs already, asked over its socket: the same answers, the same output, no model loaded. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.answers import End, Streams, Told
from cacheblend_cli.client import Connection, EngineLost, lost, named
from cacheblend_cli.engine.clock import since_process_start
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.server.place import PROTOCOL, socket_of, sockets_of
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.types import AskRequest

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import AskPlan
    from cacheblend_cli.corpus.scopes import Scope
    from cacheblend_cli.corpus.search import Found


class WarmEngine:
    """Each thing that it is asked is a connection of its own."""

    def __init__(self, path: Path, store: ChunkStore) -> None:
        self._path, self._store = path, store

    @classmethod
    def of(cls, settings: Settings, store: ChunkStore) -> WarmEngine | None:
        """None when no engine of this store, model and settings runs."""
        connection = Connection.to(socket_of(settings))
        if connection is None:
            return None
        connection.__exit__()
        return cls(socket_of(settings), store)

    def begin(self, ask_request: AskRequest) -> End:
        """Have it asked; the answer's pieces are streamed while its end is waited for. Raises what the engine tells, EngineLost."""
        connection = self._connected()
        events = connection.request("ask", ask_request.wire)

        def end(streams: Streams | None) -> Told:
            with connection:
                return self._read(events, streams)

        return end

    def plan(self, ask_request: AskRequest) -> AskPlan:
        with self._connected() as connection:
            [event] = connection.request("plan", ask_request.wire)
        plan: Any = SimpleNamespace(**event["plan"])
        self._cite(plan.chunks, event["keys"])
        return plan  # type: ignore[no-any-return]

    def _connected(self) -> Connection:
        connection = Connection.to(self._path)
        if connection is None:
            raise lost()
        return connection

    def _read(self, events: Iterator[dict[str, Any]], streams: Streams | None) -> Told:
        first_at: float | None = None
        noted: list[str] = []
        for event in events:
            if event["event"] == "done":
                return replace(self._told(event, first_at), noted=noted)
            if event["event"] == "notes":
                if streams is not None:
                    noted = event["notes"]
                    streams.notes(noted)
                continue
            first_at = first_at or time.perf_counter()
            if streams is not None:
                (streams.text if event["event"] == "text" else streams.reasoning)(event["text"])
        raise lost()

    def _told(self, event: dict[str, Any], first_at: float | None) -> Told:
        """The answer has the attributes that are shown, and its documents are called what a person standing here calls them."""
        record = event["record"]
        process_s = since_process_start(first_at or time.perf_counter())
        for timing in (record["timing"], event["answer"]["timing"]):
            timing |= {"process_s": round(process_s, 6), "model_load_s": 0.0}
        for chunks in (record["chunks"], event["answer"]["chunks"]):
            self._cite(chunks, event["keys"])
        tokens = [[named(token) for token in chunk] for chunk in event["tokens"]]
        by = f", by the engine of process {event['pid']}"
        return Told(named(event["answer"]), record, event["differences"], tokens, by)

    def _cite(self, chunks: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        """Give each chunk the name that its document has from here. keys: what was asked for."""
        from cacheblend_store import BadBlob

        from cacheblend_cli.corpus.citations import Citations

        citations = Citations(self._store)
        for chunk, key in zip(chunks, keys, strict=True):
            try:
                manifest = self._store.get_chunk(bytes.fromhex(key))
            except BadBlob:
                continue
            if manifest is not None:
                chunk["source"] = citations.of(manifest).source


def look_warm(settings: Settings, query: str, scope: Scope, say: Callable[[str], None]) -> tuple[Found, str] | None:
    """What an engine over this store finds, of whatever model, and which it is; None when none runs."""
    request = AskRequest(query, None, Resolved(settings, {}), scope).wire
    for path in sockets_of(settings):
        if _speaks_so(path) and (connection := Connection.to(path)) is not None:
            with connection, suppress(EngineLost):
                [event] = connection.request("search", request)
                return _found(event, say), f"by the engine of process {event['pid']}"
    return None


def _speaks_so(path: Path) -> bool:
    """Whether an engine listens there that is of this version."""
    connection = Connection.to(path)
    if connection is None:
        return False
    with connection:
        try:
            [status] = connection.request("status")
        except CacheBlendError:
            return False
    return bool(status.get("protocol") == PROTOCOL)


def _found(event: dict[str, Any], say: Callable[[str], None]) -> Found:
    from cacheblend_cli.corpus.search import Found, Hit

    for text in event["said"]:
        say(text)
    return Found([Hit(**{**hit, "key": bytes.fromhex(hit["key"])}) for hit in event["hits"]], event["by"])
