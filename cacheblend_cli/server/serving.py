"""Run parsed requests and send the answers as one JSON object or a stream; shared by OpenAI's and Ollama's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.engine.engine import Request as EngineRequest
from cacheblend_cli.engine.events import Done, Event
from cacheblend_cli.server.http import EventStream, encode_stream, session_headers, unless_disconnected
from cacheblend_cli.server.preprocessing import ParsedRequest, PreparedRequest, prepare
from cacheblend_cli.server.request_events import RequestEvents
from cacheblend_cli.server.server_state import AnswerEvents, ServerState


class ResponseBuilder(Protocol):
    """Builds response bodies in the form of one API."""

    def full(self, ends: Sequence[Done], prepared: Sequence[PreparedRequest]) -> dict[str, Any]:
        """Return one object with the answers to all prompts."""

    def stream(self, events: AsyncIterator[Event], prepared: PreparedRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream for one prompt."""


async def respond(
    request: Request, state: ServerState, builder: ResponseBuilder, parsed: list[ParsedRequest], stream: str | None
) -> Response:
    """Answer the prompts. stream: media type of a stream, None for one object. Raises the error of a refused prompt
    before the response begins."""
    with state.preparing(len(parsed)):
        prepared = await unless_disconnected(request, _prepare_all(state, parsed))
    session = session_headers(request, prepared[0].request.named)
    if stream is None:
        ends = await unless_disconnected(request, _run_all(state, prepared))
        return JSONResponse(builder.full(ends, prepared), headers=session)
    with ExitStack() as stack:
        events = stack.enter_context(submit(state, prepared[0].request)).events()
        first = await unless_disconnected(request, anext(events))  # a refusal gets its own HTTP status
        records = builder.stream(_chain(first, events), prepared[0])
        response = EventStream(encode_stream(state, records, stream), stack.pop_all(), stream)
        response.headers.update(session)
        return response


async def _prepare_all(state: ServerState, parsed: list[ParsedRequest]) -> list[PreparedRequest]:
    return [await prepare(state, one) for one in parsed]


async def _run_all(state: ServerState, prepared: list[PreparedRequest]) -> list[Done]:
    with ExitStack() as stack:
        submitted = [stack.enter_context(submit(state, one.request)) for one in prepared]
        return [await events.done() for events in submitted]


async def _chain(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in events:
        yield event


def submit(state: ServerState, request: EngineRequest) -> AnswerEvents:
    """Submit a request, to be decoded here or by --decoder. Raises QueueFull, UsageError."""
    events = None if state.decoder is None else state.decoder.events(state, request)
    return events or RequestEvents(state, request)
