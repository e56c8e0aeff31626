"""The socket beside the store: commands of this machine's user ask over it, in JSON lines, and get what they would say."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

from cacheblend_store import StoreError

from cacheblend_cli import __version__
from cacheblend_cli.api import Engine
from cacheblend_cli.corpus.search import look
from cacheblend_cli.engine.answer import Answer
from cacheblend_cli.engine.jobs import Done, Job, Reasoning, Text
from cacheblend_cli.engine.request import Question, resolve
from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError
from cacheblend_cli.inquiry import Inquiry, Manner
from cacheblend_cli.server.asking import Asking, first_of
from cacheblend_cli.server.place import PROTOCOL
from cacheblend_cli.server.state import ServerState

_LINE = 64 << 20  # bytes of a request at most
T = TypeVar("T")
Request = dict[str, Any]
Tell = Callable[[dict[str, Any]], Awaitable[None]]


class WarmSocket:
    """url: where else the server listens, for --status. on_stop: ends the server."""

    def __init__(self, host: ServerState, bound: socket, path: Path, url: str) -> None:
        self._host, self._bound, self._path, self._url = host, bound, path, url
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_stop: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, sock=self._bound, limit=_LINE)

    async def stop(self, grace_s: float) -> None:
        """Take no more requests. What is there may finish for so long."""
        self._path.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=grace_s)
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, ValueError, RecursionError, asyncio.CancelledError):
            pass  # the client has left, or is none of ours
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:
            return
        request: Request = json.loads(line)

        async def tell(event: dict[str, Any]) -> None:
            writer.write(json.dumps(event).encode() + b"\n")
            await writer.drain()

        await first_of(self._do(request, tell), reader.read(1))  # a client says nothing more: it leaves, or waits

    async def _do(self, request: Request, tell: Tell) -> None:
        try:
            match request["op"]:
                case "status":
                    await tell({"event": "status", "end": True, **self._status()})
                case "stop":
                    await tell({"event": "stopping", "end": True})
                    self.on_stop()
                case "ask" | "plan" | "search" as what:
                    with self._host:
                        await {"ask": self._ask, "plan": self._plan, "search": self._search}[what](request, tell)
                case other:
                    raise NotFoundError(f"the engine knows no {other!r}", "is it of another version?")
        except (CacheBlendError, StoreError) as error:
            told = {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
            await tell({"event": "failed", "kind": type(error).__name__, **told})
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as error:
            message = f"the engine failed: {type(error).__name__}: {error}"
            await tell({"event": "failed", "message": message, "hint": None, "exit_code": int(ExitCode.INTERNAL)})

    def _status(self) -> dict[str, Any]:
        host = self._host
        return {
            "pid": os.getpid(), "version": __version__, "protocol": PROTOCOL, "model": host.model, "url": self._url, "socket": str(self._path),
            "up_s": round(time.time() - host.started, 1), "idle_s": round(host.idle_s, 1), **vars(host.service.stats()),
        }  # fmt: skip

    async def _ask(self, request: Request, tell: Tell) -> None:
        inquiry = Inquiry.of_wire(request)
        job = await self._host.in_pool(lambda: self._job(inquiry))
        with Asking(self._host, job) as asking:
            await tell({"event": "notes", "notes": list(job.question.notes)})
            async for event in asking.events():
                if isinstance(event, Text):
                    await tell({"event": "text", "text": event.text})
                elif isinstance(event, Reasoning):
                    await tell({"event": "reasoning", "text": event.text})
                elif isinstance(event, Done) and event.ended == "cancelled":
                    return  # the engine ends: to who asks it is lost
                elif isinstance(event, Done):
                    told = await self._ended(event.answers[0], job.question, inquiry.manner)
                    await tell({"event": "done", "end": True, **told})

    def _job(self, inquiry: Inquiry) -> Job:
        """The job with its prompt laid out."""
        runtime, store = self._host.runtime, self._host.store
        job = Engine(runtime).job(store, inquiry)
        return replace(job, request=resolve(runtime, store, job.question))

    async def _plan(self, request: Request, tell: Tell) -> None:
        inquiry, store = Inquiry.of_wire(request), self._host.store

        def planned(engine: Engine) -> Request:
            job = engine.job(store, inquiry)
            told = engine.plan(store, job.question, auto=job.auto)
            return {"plan": plain(told), "keys": [key.hex() for key in job.question.keys]}

        await tell({"event": "plan", "end": True, **await self._in_engine(planned)})

    async def _search(self, request: Request, tell: Tell) -> None:
        said: list[str] = []
        inquiry = Inquiry.of_wire(request)
        settings = inquiry.resolved.settings
        found = await asyncio.to_thread(look, self._host.store, settings, inquiry.question, inquiry.scope, said.append)
        hits = [{**vars(hit), "key": hit.key.hex()} for hit in found.hits]
        await tell({"event": "found", "end": True, "hits": hits, "by": found.by, "said": said, "pid": os.getpid()})

    async def _in_engine(self, work: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._host.service.run(lambda runtime: work(Engine(runtime))))

    async def _ended(self, answer: Answer, question: Question, manner: Manner) -> dict[str, Any]:
        engine = Engine(self._host.runtime)
        differences, tokens = await self._host.in_pool(lambda: engine.told(self._host.store, question, answer, manner))
        return {
            "record": answer.to_dict(ids=manner.ids, explain=manner.explain),
            "answer": shown(answer),
            "keys": [key.hex() for key in question.keys],
            "differences": differences,
            "tokens": [[vars(token) for token in chunk] for chunk in tokens],
            "pid": os.getpid(),
        }


def shown(answer: Answer) -> dict[str, Any]:
    """What of an answer is shown to people; its record has the rest, where that is asked for."""
    return plain(replace(answer, prompt_ids=[], generated_ids=[], logprobs=[], prompt_logprobs=[], chosen=[]))


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON has it; of an enumeration its name."""

    def named(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: {"name": value.name} if isinstance(value, Enum) else value for name, value in items}

    return asdict(record, dict_factory=named)
