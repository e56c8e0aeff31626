"""Reading requests and streaming replies: what all routes share."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from cacheblend_cli.server.errors import ApiError, as_api_error
from cacheblend_cli.server.state import ServerState, first_of
from cacheblend_cli.server.tenants import Tenant

T = TypeVar("T")
JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
SESSION = "X-Session-ID"
_SESSION = re.compile("[!-~]{1,128}")
logger = logging.getLogger("cacheblend")


def media_type(request: Request) -> str:
    """The body's media type in lower case, without parameters; "" where there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_body(request: Request) -> bytes:
    """The body. Raises ApiError unless its type is JSON's: a browser sends other types to another site without
    asking."""
    if media_type(request) != JSON:
        raise ApiError(415, f"the body must be {JSON}")
    return await raw_body(request)


async def any_body(request: Request) -> bytes:
    """The body, whatever its type is: Ollama's clients often send JSON without saying so. Raises ApiError for one of
    another type that comes from a browser, which names the site it is from."""
    return await (json_body(request) if "origin" in request.headers else raw_body(request))


async def raw_body(request: Request) -> bytes:
    """The body, of any type. Raises ApiError when the client leaves."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise gone() from error


def session_headers(request: Request, keys: Sequence[bytes]) -> dict[str, str]:
    """The header by which a proxy sends questions over the same chunks to the same replica: the session the request
    names, else the key of its first chunk (a content hash); empty where there is neither. keys: of the prompt's chunks,
    in order."""
    named = request.headers.get(SESSION, "")
    session = named if _SESSION.fullmatch(named) else keys[0].hex() if keys else ""
    return {SESSION: session} if session else {}


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def logged(error: Exception, host: ServerState) -> ApiError:
    """The error as the API reports it; the server's own faults are logged."""
    api_error = as_api_error(error)
    if api_error.status >= 500 and not isinstance(error, ApiError):
        logger.error("a request failed: %s", getattr(error, "message", error), exc_info=api_error.status == 500)
    api_error.message = host.public(api_error.message)
    return api_error


async def pieces(host: ServerState, records: AsyncIterator[dict[str, Any]], media: str) -> AsyncIterator[bytes]:
    """Records as server-sent events (EVENTS), or as JSON lines as Ollama streams them (LINES). An error after the
    beginning is the last record."""
    are_events = media == EVENTS

    def piece(record: dict[str, Any]) -> bytes:
        text = json.dumps(record, ensure_ascii=False)
        return (f"data: {text}\n\n" if are_events else f"{text}\n").encode()

    try:
        async for record in records:
            yield piece(record)
    except Exception as error:
        api_error = logged(error, host)
        yield piece(api_error.body if are_events else api_error.ollama_body)
    if are_events:
        yield b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Send pieces as they come. It ends when the client leaves, and `stack` is closed in any case."""

    def __init__(self, pieces: AsyncIterator[bytes], stack: ExitStack, media: str = EVENTS) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, headers=headers, media_type=media)
        self._stack = stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await first_of(self.stream_response(send), left(receive))


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. It is cancelled when the client leaves: ApiError 499 then, which nobody reads."""
    done = await first_of(work, left(request.receive))
    if done is None:
        raise gone()
    return done


def gone() -> ApiError:
    return ApiError(499, "the client has left")


async def left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
