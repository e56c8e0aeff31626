"""Replies to parsed requests, as one object or a stream; shared by OpenAI's and Ollama's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.engine.engine import Request as EngineRequest
from cacheblend_cli.engine.events import Done, Event
from cacheblend_cli.server.asking import ParsedRequest, Prepared, prepare
from cacheblend_cli.server.http import EventStream, pieces, session_headers, unless_left
from cacheblend_cli.server.request_events import RequestEvents, checked
from cacheblend_cli.server.state import ServerState


class Reply(Protocol):
    """Writes answers in an API's form."""

    def whole(self, ends: Sequence[Done], prepared: Sequence[Prepared]) -> dict[str, Any]:
        """Return one object for the answers to all prompts."""

    def stream(self, events: AsyncIterator[Event], prepared: Prepared) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream for one prompt."""


async def answered(
    request: Request, host: ServerState, reply: Reply, parsed: list[ParsedRequest], stream: str | None
) -> Response:
    """Answer the prompts. stream: media type of a stream, None for one object. A prompt that is refused raises before
    the response begins."""
    with host.preparing(len(parsed)):
        prepared = await unless_left(request, _prepare_all(host, parsed))
    session = session_headers(request, prepared[0].request.named)
    if stream is None:
        ends = await unless_left(request, _ends(host, prepared))
        return JSONResponse(reply.whole(ends, prepared), headers=session)
    with ExitStack() as stack:
        asking = stack.enter_context(ask_engine(host, prepared[0].request))
        first = await unless_left(request, asking.next())  # what is refused has a status of its own
        if isinstance(first, Done):
            checked(first)
        records = reply.stream(_from(first, asking), prepared[0])
        response = EventStream(pieces(host, records, stream), stack.pop_all(), stream)
        response.headers.update(session)
        return response


async def _prepare_all(host: ServerState, parsed: list[ParsedRequest]) -> list[Prepared]:
    return [await host.in_pool(partial(prepare, host, one)) for one in parsed]


async def _ends(host: ServerState, prepared: list[Prepared]) -> list[Done]:
    with ExitStack() as stack:
        askings = [stack.enter_context(ask_engine(host, one.request)) for one in prepared]
        return [await asking.done() for asking in askings]


async def _from(first: Event, asking: RequestEvents) -> AsyncIterator[Event]:
    yield first
    async for event in asking.events():
        yield event


def ask_engine(host: ServerState, request: EngineRequest) -> RequestEvents:
    """Submit a request, to be decoded here or where --decode-url says. Raises QueueFull, UsageError."""
    if host.decoder is not None:
        from cacheblend_cli.server.remote_decoding import RemoteEvents, decodes_elsewhere

        if decodes_elsewhere(host.engine, request):
            return RemoteEvents(host, request, host.decoder)
    return RequestEvents(host, request)
