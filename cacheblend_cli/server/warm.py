"""The socket beside the store (0600): commands of this machine's user send their requests over it, by HTTP, without an API key."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import uvicorn
from cacheblend_store import StoreError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from cacheblend_cli import __version__
from cacheblend_cli.api import Engine
from cacheblend_cli.corpus.search import look
from cacheblend_cli.engine.jobs import Done, Job, Reasoning, Text
from cacheblend_cli.engine.plan import planning
from cacheblend_cli.engine.request import Question, resolve
from cacheblend_cli.engine.speeds import Pieces
from cacheblend_cli.errors import CacheBlendError, ExitCode
from cacheblend_cli.server.app import make_app
from cacheblend_cli.server.asking import Asking
from cacheblend_cli.server.errors import ApiError
from cacheblend_cli.server.http import EventStream
from cacheblend_cli.server.place import PROTOCOL
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.types import Answer, AskOptions, AskRequest

T = TypeVar("T")
Record = dict[str, Any]
_CUT_OFF_S = 10  # beyond the grace of running answers


class WarmSocket:
    """url: the address of the public server, for --status. on_stop: ends the server."""

    def __init__(self, host: ServerState, bound: socket, path: Path, url: str) -> None:
        self._host, self._bound, self._path, self._url = host, bound, path, url
        events = {
            "ask": self._ask,
            "plan": self._plan,
            "search": self._search,
            "status": self._status,
            "stop": self._stop,
        }
        own = [Route(f"/engine/{name}", self._route(make), methods=["POST"]) for name, make in events.items()]
        routes = [*own, Mount("/", make_app(host, is_owner=True))]
        config = uvicorn.Config(
            Starlette(routes=routes),
            http="h11",
            ws="none",
            log_level="error",
            log_config=None,
            lifespan="off",
            server_header=False,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.on_stop: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))

    async def stop(self, grace_s: float) -> None:
        """Take no more requests. Running ones may finish within that time; cancelling this cuts them off."""
        self._path.unlink(missing_ok=True)
        self._server.config.timeout_graceful_shutdown = round(grace_s) + _CUT_OFF_S
        self._server.should_exit = True
        try:
            if self._serving is not None:
                await asyncio.shield(self._serving)
        finally:
            self._server.force_exit = True

    def _route(self, make: Callable[[Record], AsyncIterator[Record]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
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
            **vars(host.service.stats()),
        }  # fmt: skip

    async def _stop(self, _: Record) -> AsyncIterator[Record]:
        yield {"event": "stopping", "end": True}
        self.on_stop()

    async def _ask(self, body: Record) -> AsyncIterator[Record]:
        ask_request = AskRequest.from_wire(body)
        with self._host:
            job = await self._host.in_pool(lambda: self._job(ask_request))
            with Asking(self._host, job) as asking:
                yield {"event": "notes", "notes": list(job.question.notes)}
                async for event in asking.events():
                    if isinstance(event, Text):
                        yield {"event": "text", "text": event.text}
                    elif isinstance(event, Reasoning):
                        yield {"event": "reasoning", "text": event.text}
                    elif isinstance(event, Done) and event.ended == "cancelled":
                        return  # the engine ends: to the client it is lost
                    elif isinstance(event, Done):
                        told = await self._ended(event.answers[0], job.question, ask_request.options)
                        yield {"event": "done", "end": True, **told}

    def _job(self, ask_request: AskRequest) -> Job:
        """The job with its prompt laid out."""
        runtime, store = self._host.runtime, self._host.store
        job = Engine(runtime).job(store, ask_request)
        return replace(job, request=resolve(runtime, store, job.question))

    async def _plan(self, body: Record) -> AsyncIterator[Record]:
        ask_request = AskRequest.from_wire(body)
        with self._host:
            job = await self._host.in_pool(lambda: self._job(ask_request))
            assert job.request is not None
            pieces = planning(self._host.runtime, job.request, job.auto)
            while (found := await self._host.in_engine(lambda runtime: _next(pieces))) is None:
                pass
            yield {"event": "plan", "end": True, "plan": plain(found), "keys": [key.hex() for key in job.question.keys]}

    async def _search(self, body: Record) -> AsyncIterator[Record]:
        said: list[str] = []
        ask_request = AskRequest.from_wire(body)
        settings = ask_request.resolved.settings
        with self._host:
            found = await asyncio.to_thread(
                look, self._host.store, settings, ask_request.question, ask_request.scope, said.append
            )
        hits = [{**vars(hit), "key": hit.key.hex()} for hit in found.hits]
        yield {"event": "found", "end": True, "hits": hits, "by": found.by, "said": said, "pid": os.getpid()}

    async def _ended(self, answer: Answer, question: Question, options: AskOptions) -> dict[str, Any]:
        engine = Engine(self._host.runtime)
        differences, tokens = await self._host.in_pool(lambda: engine.told(self._host.store, question, answer, options))
        return {
            "record": answer.to_dict(ids=options.ids, explain=options.explain),
            "answer": shown(answer),
            "keys": [key.hex() for key in question.keys],
            "differences": differences,
            "tokens": [[vars(token) for token in chunk] for chunk in tokens],
            "pid": os.getpid(),
        }


def _next(pieces: Pieces[T]) -> T | None:
    """Result of the pieces, None where more of them follow."""
    try:
        return next(pieces)
    except StopIteration as end:
        result: T = end.value
        return result


class _Server(uvicorn.Server):
    """Signals are the public server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def shown(answer: Answer) -> dict[str, Any]:
    """What of an answer is shown to people; its record has the rest, where that is asked for."""
    return plain(replace(answer, prompt_ids=[], logprobs=[], prompt_logprobs=[], chosen=[]))


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON has it; of an enumeration its name."""

    def named(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: {"name": value.name} if isinstance(value, Enum) else value for name, value in items}

    return asdict(record, dict_factory=named)
