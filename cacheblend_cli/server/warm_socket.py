"""The Unix socket beside the store (mode 0600): this user's commands send requests over it without an API key."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from socket import socket
from typing import Any

from cacheblend_store.conversion import convert
from msgspec import to_builtins
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from cacheblend_cli.client import SETTINGS
from cacheblend_cli.corpus.search import look
from cacheblend_cli.engine.engine import Request
from cacheblend_cli.engine.events import Done
from cacheblend_cli.errors import ExitCode
from cacheblend_cli.model.host_memory import resident_memory
from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.app import make_app
from cacheblend_cli.server.http import EventStream
from cacheblend_cli.server.idle import IdleWork
from cacheblend_cli.server.request_events import RequestEvents
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.settings.identity import left_engine_settings
from cacheblend_cli.sockets import PROTOCOL, SocketFile
from cacheblend_cli.types import Answer, AskRequest, CompletedAnswer, Notes, Piece, Progress, SearchParams
from cacheblend_cli.version import __version__

Record = dict[str, Any]
_ALWAYS = ("/engine/status", "/engine/stop")


@dataclass(frozen=True)
class _CollectBody:
    """Body of /engine/collect."""

    keys: list[str]  # hex
    codec: str
    salt: str = ""
    day: date | None = None  # that the chat template prints, None for the store's
    again: bool = False  # compute chunks that have KV, too


@dataclass(frozen=True)
class _FinishBody:
    """Body of /engine/finish."""

    salt: str = ""
    on_battery: bool = False  # compute on battery, too


class WarmSocket:
    """HTTP application of the socket. file: of the bound socket, in its place as long as the store is. url: public
    address, for --status. on_stop: callback that stops the server. idle_exit_s: 0 for never."""

    def __init__(self, state: ServerState, bound: socket, file: SocketFile, url: str) -> None:
        self._state, self.socket, self._file, self._url = state, bound, file, url
        self._engine, self._address = state.engine, (bound.getsockname(), None)
        self.idle = IdleWork(state)
        events = {
            "ask": self._ask, "plan": self._plan, "search": self._search, "collect": self._collect,
            "finish": self._finish, "status": self._status, "stop": self._stop,
        }  # fmt: skip
        own = [Route(f"/engine/{name}", self._route(make), methods=["POST"]) for name, make in events.items()]
        self._routes = Starlette(routes=[*own, Mount("/", make_app(state, is_owner=True))])
        self.on_stop: Callable[[], None] = lambda: None
        self.idle_exit_s = 0.0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, unless the socket was moved with its store: then the client means that store, and this
        engine reads what is at the store's path now."""
        is_meant = self.is_in_place or scope["path"] in _ALWAYS
        await (self._routes if is_meant else Response(status_code=503))(scope, receive, send)

    @property
    def is_in_place(self) -> bool:
        """Return whether socket and store were not moved, removed or replaced; of an engine that a command left, the
        model's files either."""
        return self._file.is_in_place and (not self._is_own or self._engine.model.has_same_files)

    @property
    def _is_own(self) -> bool:
        """Return whether a command left this engine running, on a private socket only."""
        return self._url == f"unix:{self._file.path}"

    def owns(self, address: tuple[str, int | None] | None) -> bool:
        """Return whether a connection with this local address belongs to the socket."""
        return address == self._address

    def leave(self) -> None:
        """Accept no more connections: the next command finds no engine."""
        self._file.remove()

    def _route(self, make: Callable[[Record], AsyncIterator[Record]]) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(request: HttpRequest) -> Response:
            try:
                body = await request.json()
            except (ValueError, RecursionError, ClientDisconnect):
                return Response(status_code=400)
            wanted = body.pop(SETTINGS, None) if isinstance(body, dict) else None
            if self._is_own and wanted not in (None, left_engine_settings(self._state.settings)):
                self.on_stop()  # the client answers itself, and leaves an engine with its settings
                return Response(status_code=409)
            return EventStream(_encode(make(body)), ExitStack())

        return answer

    async def _status(self, _: Record) -> AsyncIterator[Record]:
        state = self._state
        yield {
            "event": "status", "end": True, "pid": os.getpid(), "version": __version__, "protocol": PROTOCOL, "model": state.model,
            "store": os.path.abspath(state.store.path), "url": self._url, "socket": str(self._file.path),
            "own": self._is_own, "memory_bytes": resident_memory(),
            "up_s": round(time.time() - state.started, 1), "idle_s": round(state.idle_s, 1), "idle_exit_s": self.idle_exit_s,
            "missing": self.idle.num_missing, "computing": self.idle.computing, **vars(state.engine.service.stats()),
        }  # fmt: skip

    async def _stop(self, _: Record) -> AsyncIterator[Record]:
        yield {"event": "stopping", "end": True}
        self.on_stop()

    async def _ask(self, body: Record) -> AsyncIterator[Record]:
        ask = convert(body, AskRequest)
        with self._state.in_progress():
            request = await self._resolved(ask)
            with RequestEvents(self._state, request, with_progress=True) as events:
                yield {"event": "notes", **to_builtins(Notes(list(request.notes)))}
                yield {"event": "progress", **to_builtins(request.progress())}
                async for event in events.events():
                    if isinstance(event, Progress):
                        yield {"event": "progress", **to_builtins(event)}
                    elif isinstance(event, Piece):
                        yield {"event": "piece", **to_builtins(event)}
                    elif isinstance(event, Done):
                        completed = await self._completed(request, event.answers[0])
                        yield {"event": "done", "end": True, **to_builtins(completed)}

    async def _plan(self, body: Record) -> AsyncIterator[Record]:
        ask = convert(body, AskRequest)
        with self._state.in_progress():
            request = await self._resolved(ask)
            found = await self._state.in_engine(lambda: self._engine.plan_of(request))
            yield {"event": "plan", "end": True, **to_builtins({"plan": found, "names": _names(request)})}

    async def _search(self, body: Record) -> AsyncIterator[Record]:
        notes: list[str] = []
        ask = convert(body, AskRequest)
        with self._state.in_progress():
            params = ask.search or SearchParams()
            work = partial(look, self._state.store, ask.question, params, notes.append)
            found = await self._state.in_pool(self._state.keyring.own, work)
        self._state.found.extend(hit.key for hit in found.hits)
        yield {"event": "found", "end": True, "found": to_builtins(found), "notes": notes, "pid": os.getpid()}

    async def _collect(self, body: Record) -> AsyncIterator[Record]:
        """Compute the KV of stored chunks, in the order given, at most about one launch between two steps."""
        asked = convert(body, _CollectBody)
        of = self._state.store, list(map(bytes.fromhex, asked.keys)), asked.codec, asked.salt, asked.day
        with self._state.in_progress():
            work = partial(self._engine.collecting, *of, again=asked.again)
            launches = await self._state.in_pool(self._state.keyring.own, work)
            while (chunk := await self._state.in_engine(partial(next, launches, None))) is not None:
                yield {"event": "collected", "key": chunk.key.hex(), "status": chunk.status, "how": chunk.how}
        yield {"event": "done", "end": True}

    async def _finish(self, body: Record) -> AsyncIterator[Record]:
        asked = convert(body, _FinishBody)
        missing = await self.idle.finish(asked.salt, on_battery=asked.on_battery)
        yield {"event": "finishing", "end": True, "missing": missing}

    async def _resolved(self, ask: AskRequest) -> Request:
        work = partial(self._engine.resolve, self._state.store, ask)
        return await self._state.in_pool(self._state.keyring.own, work)

    async def _completed(self, request: Request, answer: Answer) -> CompletedAnswer:
        """Return the answer for the client, with prompt_ids only if requested."""
        work = partial(self._engine.explain, request, answer)
        explained, tokens = await self._state.in_pool(self._state.keyring.own, work)
        sent = replace(answer, chosen=[], prompt_ids=answer.prompt_ids if request.options.ids else [])
        return CompletedAnswer(sent, _names(request), explained, tokens, os.getpid())


def _names(request: Request) -> list[str]:
    """Return the name of each chunk's document. Clients show it relative to their working directory."""
    return [chunk.citation.name for chunk in request.chunks]


async def _encode(events: AsyncIterator[Record]) -> AsyncIterator[bytes]:
    """Encode events as server-sent events. An error becomes the last one; if the server stops, the stream just ends."""

    def encoded(record: Record) -> bytes:
        return b"data: " + json.dumps(record).encode() + b"\n\n"

    try:
        async for event in events:
            yield encoded(event)
    except Exception as error:
        if isinstance(error, ApiError) and error.code == "stopping":
            return
        message = getattr(error, "message", f"the engine failed: {type(error).__name__}: {error}")
        hint, code = getattr(error, "hint", None), getattr(error, "exit_code", ExitCode.INTERNAL)
        kind = type(error).__name__
        yield encoded({"event": "failed", "kind": kind, "message": message, "hint": hint, "exit_code": int(code)})
