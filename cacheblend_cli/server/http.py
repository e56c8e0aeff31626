"""Read request bodies and stream responses."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from cacheblend_cli.server.api_errors import ApiError, as_api_error
from cacheblend_cli.server.server_state import ServerState, first_of
from cacheblend_cli.server.tenants import Tenant

T = TypeVar("T")
JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
SESSION = "X-Session-ID"
_SESSION = re.compile("[!-~]{1,128}")
logger = logging.getLogger("cacheblend")


def media_type(request: Request) -> str:
    """Return the body's media type in lower case without parameters, "" if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_body(request: Request) -> bytes:
    """Return the body. Raises ApiError if its type is not JSON: browsers send other types across sites unasked."""
    if media_type(request) != JSON:
        raise ApiError(415, f"the body must be {JSON}")
    return await raw_body(request)


async def any_body(request: Request) -> bytes:
    """Return the body of any media type, since Ollama's clients often omit it. Raises ApiError if a browser (a request
    with an Origin header) sends another type than JSON."""
    return await (json_body(request) if "origin" in request.headers else raw_body(request))


async def raw_body(request: Request) -> bytes:
    """Return the body, of any media type. The request does not keep it. Raises ApiError if the client disconnects."""
    try:
        return b"".join([part async for part in request.stream()])
    except ClientDisconnect as error:
        raise client_disconnected() from error


def session_headers(request: Request, keys: Sequence[bytes]) -> dict[str, str]:
    """Return the header by which proxies route questions over the same chunks to the same replica. Its value is the
    request's own session, else the key of the first chunk. keys: chunk keys of the prompt in order. Returns {} if there
    is neither."""
    own = request.headers.get(SESSION, "")
    session = own if _SESSION.fullmatch(own) else keys[0].hex() if keys else ""
    return {SESSION: session} if session else {}


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def log_error(error: Exception, state: ServerState) -> ApiError:
    """Return the error as an ApiError. Logs internal errors."""
    api_error = as_api_error(error)
    if api_error.status >= 500 and not isinstance(error, ApiError):
        logger.error("a request failed: %s", getattr(error, "message", error), exc_info=api_error.status == 500)
    api_error.message = state.public(api_error.message)
    return api_error


async def encode_stream(state: ServerState, records: AsyncIterator[dict[str, Any]], media: str) -> AsyncIterator[bytes]:
    """Encode records as server-sent events (EVENTS) or JSON lines (LINES). An error becomes the last record."""
    are_events = media == EVENTS

    def encode(record: dict[str, Any]) -> bytes:
        text = json.dumps(record, ensure_ascii=False)
        return (f"data: {text}\n\n" if are_events else f"{text}\n").encode()

    try:
        async for record in records:
            yield encode(record)
    except Exception as error:
        api_error = log_error(error, state)
        yield encode(api_error.body if are_events else api_error.ollama_body)
    if are_events:
        yield b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Streaming response that ends when the client disconnects. Always closes `stack`."""

    def __init__(self, content: AsyncIterator[bytes], stack: ExitStack, media: str = EVENTS) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type=media)
        self._stack = stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await first_of(self.stream_response(send), disconnected(receive))


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the work's result. If the client disconnects, cancels the work and raises ApiError 499."""

    async def result() -> tuple[T]:
        return (await work,)

    done = await first_of(result(), disconnected(request.receive))
    if done is None:
        raise client_disconnected()
    return done[0]


def client_disconnected() -> ApiError:
    return ApiError(499, "the client disconnected")


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
