"""The socket beside the store (0600): commands of this machine's user send their requests over it, by HTTP, without an
API key."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

from cacheblend_store import StoreError
from msgspec import convert, to_builtins
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Mount, Route

from cacheblend_cli.corpus.search import look
from cacheblend_cli.engine.engine import Request
from cacheblend_cli.engine.events import Done, Reasoning, Text
from cacheblend_cli.errors import CacheBlendError, ExitCode
from cacheblend_cli.server.app import make_app
from cacheblend_cli.server.errors import ApiError
from cacheblend_cli.server.http import EventStream
from cacheblend_cli.server.request_events import RequestEvents
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.sockets import PROTOCOL
from cacheblend_cli.types import Answer, AskRequest, SearchParams
from cacheblend_cli.version import __version__

Record = dict[str, Any]


class WarmSocket:
    """url: the address of the public server, for --status. on_stop: ends the server."""

    def __init__(self, host: ServerState, bound: socket, path: Path, url: str) -> None:
        self._host, self.socket, self._path, self._url = host, bound, path, url
        self._engine, self._address = host.engine, (bound.getsockname(), None)
        events = {
            "ask": self._ask,
            "plan": self._plan,
            "search": self._search,
            "status": self._status,
            "stop": self._stop,
        }
        own = [Route(f"/engine/{name}", self._route(make), methods=["POST"]) for name, make in events.items()]
        self.app = Starlette(routes=[*own, Mount("/", make_app(host, is_owner=True))])
        self.on_stop: Callable[[], None] = lambda: None

    def owns(self, address: tuple[str, int | None] | None) -> bool:
        """Return whether a connection with this local address is one to the socket."""
        return address == self._address

    def leave(self) -> None:
        """Take no more requests: the next command finds no engine."""
        self._path.unlink(missing_ok=True)

    def _route(self, make: Callable[[Record], AsyncIterator[Record]]) -> Callable[[HttpRequest], Any]:
        async def answer(request: HttpRequest) -> Response:
            try:
                body = await request.json()
            except (ValueError, RecursionError, ClientDisconnect):
                return Response(status_code=400)
            return EventStream(_written(make(body)), ExitStack())

        return answer

    async def _status(self, _: Record) -> AsyncIterator[Record]:
        host = self._host
        yield {
            "event": "status", "end": True, "pid": os.getpid(), "version": __version__, "protocol": PROTOCOL, "model": host.model,
            "url": self._url, "socket": str(self._path), "up_s": round(time.time() - host.started, 1), "idle_s": round(host.idle_s, 1),
            **vars(host.engine.stats()),
        }  # fmt: skip

    async def _stop(self, _: Record) -> AsyncIterator[Record]:
        yield {"event": "stopping", "end": True}
        self.on_stop()

    async def _ask(self, body: Record) -> AsyncIterator[Record]:
        ask = convert(body, AskRequest)
        with self._host:
            request = await self._host.in_pool(lambda: self._engine.resolve(self._host.store, ask))
            with RequestEvents(self._host, request) as asking:
                yield {"event": "notes", "notes": list(request.notes)}
                async for event in asking.events():
                    if isinstance(event, Text | Reasoning):
                        yield {"event": "text" if isinstance(event, Text) else "reasoning", "text": event.text}
                    elif isinstance(event, Done) and event.ended == "cancelled":
                        return  # the engine ends: to the client it is lost
                    elif isinstance(event, Done):
                        yield {"event": "done", "end": True, **await self._reply(request, event.answers[0])}

    async def _plan(self, body: Record) -> AsyncIterator[Record]:
        ask = convert(body, AskRequest)
        with self._host:
            request = await self._host.in_pool(lambda: self._engine.resolve(self._host.store, ask))
            found = await self._host.in_engine(lambda: self._engine.planned(request))
            yield {"event": "plan", "end": True, **to_builtins({"plan": found, "names": _names(request)})}

    async def _search(self, body: Record) -> AsyncIterator[Record]:
        notes: list[str] = []
        ask = convert(body, AskRequest)
        with self._host:
            found = await asyncio.to_thread(
                look, self._host.store, ask.question, ask.search or SearchParams(), notes.append
            )
        yield {"event": "found", "end": True, "found": to_builtins(found), "notes": notes, "pid": os.getpid()}

    async def _reply(self, request: Request, answer: Answer) -> Record:
        """The fields of client.py: Reply. Token ids are sent if they are asked for."""
        explained, tokens = await self._host.in_pool(lambda: self._engine.explain(request, answer))
        sent = replace(answer, chosen=[], prompt_ids=answer.prompt_ids if request.options.ids else [])
        names = _names(request)
        record = {"answer": sent, "names": names, "explained": explained, "tokens": tokens, "pid": os.getpid()}
        return to_builtins(record)  # type: ignore[no-any-return]


def _names(request: Request) -> list[str]:
    """Return the name of each chunk's document: how it is shown depends on where the client stands."""
    return [chunk.citation.name for chunk in request.chunks]


async def _written(events: AsyncIterator[Record]) -> AsyncIterator[bytes]:
    """Server-sent events. An error is the last one; where the server ends, the stream does without an end."""
    try:
        async for event in events:
            yield _event(event)
    except (CacheBlendError, StoreError) as error:
        yield _event(_failed(error, error.message, error.hint, error.exit_code))
    except ApiError as error:
        if error.code != "stopping":
            yield _event(_failed(error, error.message, None, ExitCode.INTERNAL))
    except Exception as error:
        yield _event(_failed(error, f"the engine failed: {type(error).__name__}: {error}", None, ExitCode.INTERNAL))


def _failed(error: Exception, message: str, hint: str | None, code: int) -> Record:
    return {"event": "failed", "kind": type(error).__name__, "message": message, "hint": hint, "exit_code": int(code)}


def _event(record: Record) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"
